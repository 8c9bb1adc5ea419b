"""A fake engine whose answers a test writes: one text for each turn of the assistant, in tokens of one byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.fakes.fake_engine import FakeEngine


class ScriptedEngine(FakeEngine):
    """Its tokens are not those that the tokenizer makes of the text: what is tokenized again is seen to differ."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        super().__init__()
        self._opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self.end_of_turn = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.turns = [
            [token for letter in text for token in tokenizer.encode(letter)] + [self.end_of_turn] for text in turns
        ]

    def _next_token(self, context: Sequence[int]) -> int:
        size = len(self._opening)
        starts = [i + size for i in range(len(context)) if list(context[i : i + size]) == self._opening]
        return self.turns[len(starts) - 1][len(context) - starts[-1]]
