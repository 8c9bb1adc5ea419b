"""Labels of choices, chance, and the boxed form of each scorer. Responses are graded in test_tables.py."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.registry import Registry
from services.reward.scorers import gpqa, random


def item(response: str, label: str | None = None, *, item_id: str = "1", **metadata: Any) -> ScoreItem:
    return ScoreItem(item_id=item_id, prompt="", response=response, label=label, metadata=metadata)


CHOICES = ["a meson", "a baryon", "an electron", "2"]


@pytest.mark.parametrize("label", ["B", "1", "a baryon"])
def test_the_label_of_a_choice_is_its_letter_its_number_or_its_text(label: str) -> None:
    assert gpqa.score(item("Answer: B", label, choices=CHOICES)) == 1.0
    assert gpqa.score(item("Answer: A", label, choices=CHOICES)) == 0.0
    by_letter = dict(zip("ABCD", CHOICES, strict=True))
    assert gpqa.score(item("Answer: B", None, correct_letter="b", choices=by_letter)) == 1.0


def test_a_choice_whose_text_is_a_number_is_not_taken_for_the_number_of_a_choice() -> None:
    assert gpqa.score(item("D", "2", choices=CHOICES)) == 1.0
    assert gpqa.score(item("C", "2", choices=["x", "y", "z"])) == 1.0


@pytest.mark.parametrize(("label", "metadata"), [(None, {}), ("Z", {}), ("9", {}), ("B", {"choices": 7})])
def test_a_question_without_a_right_choice_is_an_error_and_not_a_reward(
    label: str | None, metadata: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="gpqa"):
        gpqa.score(item("B", label, **metadata))


def test_chance_is_fair_and_the_same_for_the_same_sample() -> None:
    first = [random.score(item("x", item_id=str(number))) for number in range(2000)]
    assert first == [random.score(item("x", item_id=str(number))) for number in range(2000)]
    assert set(first) == {0.0, 1.0}
    assert 900 < sum(first) < 1100


def test_every_scorer_of_headraces_own_has_a_boxed_form() -> None:
    registry = Registry.of("boxed_f1", None)
    for scorer in registry.all():
        assert registry.require(f"boxed_{scorer.name}").boxed
    assert registry.default == "boxed_f1"
