"""Which tokens of a conversation an assistant wrote: what supervised fine-tuning trains.

An assistant's turn lies between two marks of the family's chat template: what opens it is the template's, what closes
it is the assistant's last word and is trained with it. Marks are found among the tokens, so nothing is tokenized twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """`opening` is not trained; the first of `closings` that follows is."""

    opening: str
    closings: tuple[str, ...]


FAMILIES: Mapping[str, TurnMarks] = {
    "qwen": TurnMarks("<|im_start|>assistant\n", ("<|im_end|>",)),
    "qwen3": TurnMarks("<|im_start|>assistant\n", ("<|im_end|>",)),
    "llama3": TurnMarks("<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>", "<|eom_id|>")),
    "glm4": TurnMarks("<|assistant|>", ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "distill_qwen": TurnMarks("<｜Assistant｜>", ("<｜end▁of▁sentence｜>",)),
    "deepseek": TurnMarks("<｜Assistant｜>", ("<｜end▁of▁sentence｜>",)),
    "kimi": TurnMarks("<|im_assistant|>assistant<|im_middle|>", ("<|im_end|>",)),
}
"""By --loss-mask-type. GLM's assistants end where the next speaker is named: that mark is what they learn to say."""


class ChatMask:
    """For one tokenizer and family. Raises ConfigError when the tokenizer does not know the family's marks."""

    def __init__(self, tokenizer: Any, family: str) -> None:
        marks = FAMILIES[family]
        self._family = family
        self._opening = _ids(tokenizer, marks.opening)
        self._closings = [_ids(tokenizer, closing) for closing in marks.closings]
        known = [ids for ids in self._closings if len(ids) == 1]
        if not known:
            raise ConfigError(
                f"the tokenizer has no token for any of {', '.join(marks.closings)}: --loss-mask-type {family} is of "
                f"another family; choose one of {', '.join(FAMILIES)}",
                field="loss_mask_type",
            )
        self._closings = known

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """1 for each token that an assistant wrote. Raises InvalidArgument when none did."""
        mask, place = np.zeros(len(tokens), dtype=np.uint8), 0
        while (start := _find(tokens, self._opening, place)) is not None:
            place = self._end(tokens, start)
            mask[start:place] = 1
        if not mask.any():
            raise InvalidArgument(
                f"the conversation has no assistant's turn as --loss-mask-type {self._family} knows them: add one"
            )
        return mask

    def _end(self, tokens: Sequence[int], start: int) -> int:
        found = [end for closing in self._closings if (end := _find(tokens, closing, start)) is not None]
        return min(found, default=len(tokens))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _find(tokens: Sequence[int], wanted: Sequence[int], start: int) -> int | None:
    """Where `wanted` ends, the first time from `start` on."""
    size = len(wanted)
    for place in range(start, len(tokens) - size + 1):
        if list(tokens[place : place + size]) == list(wanted):
            return place + size
    return None
