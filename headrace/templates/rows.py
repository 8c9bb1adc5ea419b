"""The data of each template: rows for training, and rows for evaluation that are in no way among them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_SEED = 1
_NUM_HELD_OUT = 48
_END = "<|im_end|>"
_NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Felix", "Grace", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pencils", "stamps", "stones", "tickets")
_FACTS = (
    *(("the capital of France", "Paris"), ("the capital of Japan", "Tokyo"), ("the capital of Italy", "Rome")),
    *(("the capital of Egypt", "Cairo"), ("the capital of Canada", "Ottawa"), ("the capital of Peru", "Lima")),
    *(("the largest planet", "Jupiter"), ("the nearest star", "the Sun"), ("the chemical symbol of gold", "Au")),
    *(("the chemical symbol of iron", "Fe"), ("the opposite of hot", "cold"), ("the opposite of early", "late")),
    *(("the number of days in a week", "seven"), ("the number of sides of a triangle", "three")),
    *(("the color of snow", "white"), ("the frozen form of water", "ice")),
)


def sums() -> tuple[Sequence[Row], Sequence[Row]]:
    """Sums and differences of digits, none below zero. A worked sum shows what is wanted, and where a response ends."""
    example = f"2 + 2 = 4{_END}\n"
    pairs = [(a, b) for a in range(10) for b in range(10)]
    tasks = [*((f"{a} + {b} =", a + b) for a, b in pairs), *((f"{a} - {b} =", a - b) for a, b in pairs if a >= b)]
    return _split([{"prompt": f"{example}{task}", "label": str(result)} for task, result in tasks])


def products() -> tuple[Sequence[Row], Sequence[Row]]:
    """Products of two numbers of two digits, which a small model cannot compute by itself."""
    example = f"12 * 34 = <<12 * 34>> 408{_END}\n"
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    return _split([{"prompt": f"{example}{a} * {b} =", "label": str(a * b)} for a, b in pairs])


def problems() -> tuple[Sequence[Row], Sequence[Row]]:
    """Word problems with one or two operations."""
    draw = random.Random(_SEED)
    rows: dict[str, Row] = {}
    while len(rows) < 1000:
        name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
        first, second, third = draw.randint(2, 20), draw.randint(2, 20), draw.randint(2, 9)
        text, label = draw.choice(
            (
                (f"{name} has {first} {thing} and buys {second} more.", first + second),
                (f"{name} has {first + second} {thing} and gives {second} away.", first),
                (f"{name} has {third} boxes with {first} {thing} each.", third * first),
                (f"{name} has {first + second} {thing}, loses {second} and finds {third}.", first + third),
            )
        )
        question = f"{text} How many {thing} does {name} have now? End with the number."
        rows[question] = {"prompt": [{"role": "user", "content": question}], "label": str(label)}
    return _split(list(rows.values()))


def questions() -> tuple[Sequence[Row], Sequence[Row]]:
    """Questions with a reference answer, for a judge."""
    return _split(
        [{"prompt": [{"role": "user", "content": f"What is {asked}?"}], "label": answer} for asked, answer in _FACTS],
        held_out=4,
    )


def conversations() -> tuple[Sequence[Row], Sequence[Row]]:
    """Conversations whose assistant answers in one sentence."""
    rows = [
        {
            "prompt": [
                {"role": "user", "content": form.format(asked)},
                {"role": "assistant", "content": f"{asked[0].upper()}{asked[1:]} is {answer}."},
            ]
        }
        for asked, answer in _FACTS
        for form in ("What is {}?", "Tell me {}.", "Please name {}.", "Do you know {}?")
    ]
    return rows, ()


def _split(rows: Sequence[Row], held_out: int = _NUM_HELD_OUT) -> tuple[Sequence[Row], Sequence[Row]]:
    """(train, eval), shuffled by a fixed seed."""
    shuffled = list(rows)
    random.Random(_SEED).shuffle(shuffled)
    return shuffled[held_out:], shuffled[:held_out]
