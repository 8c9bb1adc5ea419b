"""Tables of responses, with the scores that follow from the definitions of the scorers' sources."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.registry import cpu_limit
from services.reward.scorers import code, dapo, deepscaler, exact_match, f1, gpqa, judge, reasoning_gym, regex

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


def test_dapo_reads_what_follows_the_last_answer_of_the_last_300_characters() -> None:
    """The reward of the DAPO paper (arXiv:2503.14476). Values are compared as `math` does."""
    rows = table("dapo")
    with cpu_limit(60):
        scores = [dict(dapo.score(item(row))) for row in rows]  # type: ignore[arg-type]
    assert wrong(rows, [score["score"] for score in scores]) == []
    assert all(score["acc"] == (score["score"] == 1.0) for score in scores)


def test_deepscaler_reads_the_last_box_behind_the_thoughts() -> None:
    """The reward of DeepScaleR: no end of the thoughts or no box is a wrong format."""
    rows = table("deepscaler")
    with cpu_limit(60):
        assert wrong(rows, [deepscaler.score(item(row)) for row in rows]) == []


def test_f1_counts_the_words_that_response_and_label_share() -> None:
    """SQuAD's words (lower case, no ASCII marks, no articles) and HotpotQA's rule for yes, no and noanswer."""
    rows = table("f1")
    assert wrong(rows, [round(f1.score(item(row)), 6) for row in rows]) == []


def test_exact_match_wants_the_label_and_nothing_else() -> None:
    rows = table("exact_match")
    assert wrong(rows, [exact_match.score(item(row)) for row in rows]) == []


def test_regex_finds_the_pattern_as_pythons_re_does() -> None:
    rows = table("regex")
    assert wrong(rows, [regex.score(item(row)) for row in rows]) == []


def test_reasoning_gym_reads_the_answer_in_the_format_of_its_row() -> None:
    """The package's prompt asks for `<answer>…</answer>`; what an answer is paid is the task's own."""
    rows = table("reasoning_gym")
    assert wrong(rows, [round(reasoning_gym.score(item(row)), 6) for row in rows]) == []


def graded(row: Row) -> float | None:
    """The judge's grade, or None where its text has no clear one, which is an error and no reward."""
    grade = judge.json_grade if row["metadata"]["json"] else judge.grade
    try:
        return round(grade(row["response"], row["metadata"]["scale"]), 6)
    except InvalidArgument:
        return None


def test_a_judges_grade_is_the_one_number_that_its_text_ends_with() -> None:
    """The judge is asked for a grade in a box; alone on the last line or in JSON it is as clear."""
    rows = table("judge")
    assert wrong(rows, [graded(row) for row in rows]) == []


def test_ifbench_pays_responses_that_keep_all_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IFBench's descriptions (arXiv:2507.02833) of the instructions whose checkers read none of NLTK's data."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("if_verifiable")
    from services.reward.scorers import ifbench  # a package of an extra

    for path in ifbench._DATA.values():
        (tmp_path / path).mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    rows = table("ifbench")
    scores = [ifbench.score(item(row)) for row in rows]
    assert wrong(rows, [score["score"] for score in scores]) == []
    assert [score["share"] for score in scores] == [row.get("share", row["expected"]) for row in rows]


async def test_code_is_paid_when_it_passes_the_tests_of_its_task() -> None:
    """MBPP's assertions, and outputs and results as APPS, TACO, LiveCodeBench and PrimeIntellect compare them."""
    rows, at_a_time = table("code"), asyncio.Semaphore(4)

    async def score(row: Row) -> float:
        async with at_a_time:
            return await code.score(item(row))

    assert wrong(rows, await asyncio.gather(*map(score, rows))) == []
