"""A streamed response's text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.rollout.production.prompts import IncrementalDetokenizer
from tests.support.models.chat_templates import make_chat_tokenizer

TEXT = "Größe: 3 €, 漢字 and 🙂🙃 in a row. " * 20


@pytest.mark.parametrize("step", [1, 2, 7])
def test_the_pieces_are_the_whole_text_and_cost_as_much_as_it_and_not_its_square(step: int) -> None:
    tokenizer = make_chat_tokenizer("qwen3")
    tokens = tokenizer.encode(TEXT)
    num_decoded = 0

    def decode(some: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(some)
        return str(tokenizer.decode(list(some), skip_special_tokens=True))

    pieces = IncrementalDetokenizer(decode)
    ends = [*range(step, len(tokens), step), len(tokens)]
    found = [pieces.next(tokens[:end], is_last=end == len(tokens)) for end in ends]
    assert "".join(piece for piece in found if piece is not None) == TEXT
    assert not any("\ufffd" in piece for piece in found if piece is not None)
    assert num_decoded < 20 * len(tokens) < len(tokens) ** 2 / (2 * step)
