"""An engine that takes real weights and whose tokens follow from the prompt and the request's seed alone.

`python -m tests.golden.engine PORT MODEL [TEXT|TEXT …]`: each further argument is one turn of the assistant, of which
the seed picks one of the texts between the bars. Without them it answers with random tokens, a quarter of which end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

from tests.support.fakes.gloo_engine import GlooEngine

_seed = ContextVar("seed", default=0)


class GoldenEngine(GlooEngine):
    """Answers in the same way whatever weights it has: what it says must not depend on when it was asked."""

    def __init__(self, port: int, model: Path, turns: Sequence[str] = (), *, token_seconds: float = 0.0) -> None:
        super().__init__(port, token_seconds=token_seconds)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._opening = self._tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._end = int(self._tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._turns = [[self._spelled(text) for text in turn.split("|")] for turn in turns]

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["sampling_params"]
        _seed.set(int(params.get("sampling_seed", 0)))
        # SGLang ends at the model's end of turn without being told.
        ends = {"stop_token_ids": [*params.get("stop_token_ids", ()), self._end]}
        return await super()._generate(request, {**body, "sampling_params": {**params, **ends}})

    def _next_token(self, context: Sequence[int]) -> int:
        if not self._turns:
            number = self._number(context)
            return self._end if number % 4 == 0 else 3 + number // 4 % 250
        size = len(self._opening)
        starts = [i + size for i in range(len(context)) if list(context[i : i + size]) == self._opening]
        start = starts[-1] if starts else len(context)
        texts = self._turns[min(len(starts), len(self._turns)) - 1]
        text = texts[self._number(context[:start]) % len(texts)]
        place = len(context) - start
        return text[place] if place < len(text) else self._end

    def _number(self, context: Sequence[int]) -> int:
        digest = hashlib.sha256(f"{_seed.get()}:{','.join(map(str, context))}".encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def _spelled(self, text: str) -> list[int]:
        """One token a letter: not what a tokenizer makes of the text, so what is tokenized again is seen to differ."""
        return [token for letter in text for token in self._tokenizer.encode(letter)] + [self._end]


async def main(port: str, model: str, *turns: str) -> None:
    """Serves until it is killed."""
    logging.disable()  # a health check in HTTP/2 is a traceback in the log of aiohttp
    await GoldenEngine(int(port), Path(model), turns).start(seconds=60)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
