"""Tables of responses, with the scores that follow from the definitions of the scorers' sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.score import ScoreItem
from services.reward.scorers import gpqa

Row = dict[str, Any]


def table(name: str) -> list[Row]:
    """At least fifty rows of a response, what it is scored with, the expected score and why; none twice."""
    lines = (Path(__file__).parent / f"{name}_answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 50
    assert len({json.dumps({**row, "why": "", "expected": ""}, sort_keys=True) for row in rows}) == len(rows)
    return rows


def item(row: Row, **changes: Any) -> ScoreItem:
    given = {"label": row.get("label"), "metadata": row.get("metadata", {}), **changes}
    return ScoreItem(item_id="1", prompt="", response=row["response"], **given)


def wrong(rows: Sequence[Row], scores: Sequence[object]) -> list[tuple[object, Row]]:
    """The rows with other scores than expected, each with its score."""
    return [(score, row) for row, score in zip(rows, scores, strict=True) if score != row["expected"]]


def test_gpqa_reads_the_letter_that_a_response_chooses() -> None:
    """GPQA asks for "The correct answer is (letter)", OpenAI's simple-evals for "Answer: letter" in many languages."""
    rows = table("gpqa")
    chosen = ["".join(letter for letter in "ABCD" if gpqa.score(item(row, label=letter)) == 1.0) for row in rows]
    assert wrong(rows, chosen) == []
