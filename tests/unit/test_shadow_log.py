"""Comparisons of two scorers: what is read from them, and what the file keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.client.reward import score_until
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from headrace.shadow_log import Comparison, Difference, ShadowLog


def comparison(number: int, live: float, shadow: float, tokens: int = 1, version: str = "v") -> Comparison:
    return Comparison(f"s{number}", f"g{number}", tokens, "a", "1", live, "b", version, shadow)


def test_correlations_are_those_of_the_textbook() -> None:
    # y = x² over 1…4: Pearson 25 / √(5 · 129), Spearman 1, as the order is the same
    found = Difference.of([comparison(i, float(i), float(i * i)) for i in range(1, 5)])
    assert found.pearson == pytest.approx(25 / (5 * 129) ** 0.5)
    assert found.spearman == pytest.approx(1.0)
    # ranks with ties: 1, 2.5, 2.5, 4 against 4, 2.5, 2.5, 1
    ties = [comparison(i, x, -x) for i, x in enumerate((0.0, 1.0, 1.0, 2.0))]
    assert Difference.of(ties).spearman == pytest.approx(-1.0)
    assert Difference.of([comparison(i, 1.0, float(i)) for i in range(3)]).pearson is None


def test_bias_by_length_and_the_samples_that_differ_most() -> None:
    given = [comparison(i, 0.5, 0.5 + (i >= 6) * i, tokens=i) for i in range(8)]
    found = Difference.of(given, 1)
    assert [(q.shortest, q.longest, q.samples, q.difference) for q in found.by_length] == [
        *((0, 1, 2, 0.0), (2, 3, 2, 0.0), (4, 5, 2, 0.0)),
        (6, 7, 2, 6.5),
    ]
    assert (found.samples, found.equal, [each.sample_id for each in found.furthest]) == (8, 6, ["s7"])


def test_responses_of_equal_length_are_not_divided() -> None:
    given = [comparison(i, 0.0, float(i), tokens=3 + (i == 7)) for i in range(8)]
    assert [(q.shortest, q.longest, q.samples, q.difference) for q in Difference.of(given).by_length] == [
        (3, 3, 7, 3.0),
        (4, 4, 1, 7.0),
    ]


def test_the_file_is_bounded_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    log = ShadowLog(tmp_path / "shadow.jsonl", most_bytes=4_000)
    for number in range(200):
        log.append([comparison(number, 0.0, 1.0)])
    with log.path.open("ab") as file:
        file.write(b'{"sample_id": "to')
    numbers = [int(each.sample_id[1:]) for each in log.all()]
    assert numbers == list(range(numbers[0], 200))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5_000


def test_the_latest_pair_of_scorers_is_compared_and_a_sample_once(tmp_path: Path) -> None:
    log = ShadowLog(tmp_path / "shadow.jsonl")
    log.append([comparison(1, 0.0, 1.0, version="old"), comparison(2, 0.0, 1.0), comparison(2, 0.0, 1.0)])
    assert [each.sample_id for each in log.latest_pair()] == ["s2"]


async def test_a_group_is_scored_by_one_scorer_also_when_it_is_replaced_between_two_tries() -> None:
    items = [ScoreItem(str(i), "", "", group_id="g" if i < 2 else "other") for i in range(3)]
    calls: list[list[str]] = []

    async def ask(some: Sequence[ScoreItem], left: float) -> Sequence[ScoreResult]:
        calls.append([item.item_id for item in some])
        first = len(calls) == 1
        return [
            ScoreError("SCORER_TIMEOUT", "", retryable=True)
            if first and item.item_id == "1"
            else Score(0.0, "old" if first else "new", "1")
            for item in some
        ]

    results = await score_until(float("inf"), items, ask, lambda _: False)
    assert [result.scorer for result in results if isinstance(result, Score)] == ["new", "new", "old"]
    assert calls == [["0", "1", "2"], ["1"], ["0", "1"]]
