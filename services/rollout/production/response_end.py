"""Finds the end of a response that several requests made, where an unbroken one would have ended.

An engine looks for stop strings in the tokens of one request, and looks at no token of the step in which a request is
aborted. The tokens around a seam are examined here, in the way that SGLang examines them: a stop string ends the
response at the first token after which it is in the text of the last tokens, one more than its longest stop string has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.models.end_tokens import end_tokens
from services.rollout.engine.answers.response import Finish
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.production.prompts import PromptEncoder

OffLoop = Callable[..., Awaitable[Any]]

_UNSEEN_TOKENS = 64
"""The most that an engine samples in one step, by speculative decoding."""
_HALF_A_CHARACTER = "\ufffd"
# Beside the tokenizer's end of sequence, SGLang ends a response at these.
_END_TEXTS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokenizer's two directions, and the tokens that end every response."""

    decode: Callable[[Sequence[int]], str]
    num_tokens: Callable[[str], int]
    """The number of tokens of a text, without any that begin or end a sequence."""
    end_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Seam:
    """A request's first token is at `start` of the response, whose first `examined` tokens do not end it."""

    start: int
    examined: int

    def is_near(self, stops: Sequence[str]) -> bool:
        """False where no stop string reaches from before the seam: no token is less than a byte, but for one before."""
        return self.start > 0 and any(self.examined <= self.start + len(stop.encode()) + 1 for stop in stops)


class ResponseEnd:
    """Knows only a request's stop tokens where it has no `texts`. `off_loop` runs what asks for and uses them."""

    def __init__(self, texts: Callable[[], Texts] | None = None, off_loop: OffLoop = asyncio.to_thread) -> None:
        self._texts = texts
        self._off_loop = off_loop

    @classmethod
    def of(cls, encoder: PromptEncoder, hf_checkpoint: Path) -> ResponseEnd:
        """Reads the checkpoint at the first seam."""
        return cls(cache(lambda: texts_of(encoder.tokenizer, hf_checkpoint)), encoder.off_loop)

    async def length(self, response: Generation, params: SamplingParams, seam: Seam) -> int | None:
        """Returns the length at which an unbroken response ends, or None if it goes on, or ended as it says."""
        if response.finish is Finish.ABORT or seam.is_near(params.stop):
            length: int | None = await self._off_loop(self._length, response, params, seam)
            return length
        return None

    async def next_request(self, params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
        """Returns what to ask for after these tokens: few tokens if they may end with the beginning of a stop string.

        An engine does not see that string, and would go on to the longest response.
        """
        rest = params.after(len(tokens))
        if not (tokens and params.stop and self._texts):
            return rest
        most = await self._off_loop(self._begun_stop, tokens, params)
        return rest.at_most(most) if most else rest

    def _length(self, response: Generation, params: SamplingParams, seam: Seam) -> int | None:
        tokens, texts = response.tokens, self._texts() if self._texts else None
        window = _window(texts, params) if texts else 0
        end_tokens = {*params.stop_token_ids, *(texts.end_tokens if texts else ())}
        first_unseen = len(tokens) - _UNSEEN_TOKENS if response.finish is Finish.ABORT else len(tokens)
        for length in range(seam.examined + 1, len(tokens) + 1):
            is_unseen, crosses = length > first_unseen, seam.start > 0 and length < seam.start + window
            if is_unseen and tokens[length - 1] in end_tokens:
                return length
            if texts and window and (is_unseen or crosses):
                text = texts.decode(tokens[max(length - window, 0) : length])
                if any(stop in text for stop in params.stop):
                    return length
        return None

    def _begun_stop(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens in which a stop string that has begun is complete; 0 if none has."""
        assert self._texts is not None
        texts = self._texts()
        num_tokens = _window(texts, params) - 1
        text = texts.decode(tokens[-num_tokens:])
        has_begun = text.endswith(_HALF_A_CHARACTER) or any(
            text.endswith(stop[:length]) for stop in params.stop for length in range(1, len(stop))
        )
        return num_tokens if has_begun else 0


def texts_of(tokenizer: Any, hf_checkpoint: Path) -> Texts:
    """Returns the texts of a checkpoint's tokenizer, with the ends that SGLang reads from the checkpoint."""
    added = tokenizer.get_added_vocab()
    ends = {added[text] for text in _END_TEXTS if text in added} | end_tokens(hf_checkpoint)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return Texts(
        decode=lambda tokens: str(tokenizer.decode(list(tokens))),
        num_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        end_tokens=frozenset(ends),
    )


def _window(texts: Texts, params: SamplingParams) -> int:
    """The number of last tokens in whose text SGLang looks for stop strings; 0 for a request without any."""
    return max((texts.num_tokens(stop) + 1 for stop in params.stop), default=0)
