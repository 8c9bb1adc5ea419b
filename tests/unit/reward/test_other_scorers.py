"""Scorers of words, choices and marks, and one for a box around each, against answers as models give them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.registry import Registry
from services.reward.scorers import dapo, f1, gpqa, judge, random


def item(response: str, label: str | None = None, *, item_id: str = "1", **metadata: Any) -> ScoreItem:
    return ScoreItem(item_id=item_id, prompt="", response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0),
        ("<think>Rome</think>in Paris, France", "Paris", 2 / 4),
        ("cat cat dog", "cat dog dog", 4 / 6),
        ("yes", "no", 0.0),
        ("yes it is", "yes", 2 / 4 * 0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall_of_words(response: str, label: str, expected: float) -> None:
    assert f1.score(item(response, label)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Thus\nAnswer: 42", True),
        ("Answer: 1\nno\nANSWER : $42$", True),
        (r"**Answer:** \boxed{42}", True),
        ("Answer: 42.0", True),
        ("Answer: 41", False),
        ("It is 42", False),
        ("Answer: 42" + " and so on" * 40, False),
    ],
)
def test_dapo_wants_the_answer_behind_its_word_and_punishes_all_else(response: str, right: bool) -> None:
    assert dapo.score(item(response, "42")) == {"score": 1.0 if right else -1.0, "acc": float(right)}


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


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (r"Good. \boxed{7}", 0.7),
        ("I give it 8/10.", 0.8),
        (r"<think>\boxed{1}</think>\boxed{10}", 1.0),
        (r"\boxed{7.5}", 0.75),
        (r"\boxed{0}", 0.0),
        (r"Two steps are missing. \boxed{4/10}", 0.4),
        ("**Score: 6/10**", 0.6),
        (r"\boxed{\dfrac{9}{10}}", 0.9),
        ("The final grade is 6.5 out of 10.", 0.65),
        (r"\boxed{\text{Grade: } 5}", 0.5),
        ("### Grade\n8", 0.8),
        ('{"grade": 3, "reason": "2 errors in 10 lines"}', 0.3),
        ('```json\n{"grade": 7.5, "of": 10}\n```', 0.75),
    ],
)
def test_a_judges_last_grade_counts_over_the_highest(said: str, expected: float) -> None:
    assert judge.grade(said, 10.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    "said",
    [
        *("It is good.", r"\boxed{good}", r"\boxed{11}", r"\boxed{-1}", "", r"\boxed{4/5}", r"\boxed{7, 8}", "7 or 8"),
        *(r"No grade here: the student wrote \boxed{10}", r'It says "\boxed{10}".', "> \\boxed{10}"),
        *("There are 10 steps.", "It solved 10 of 10 parts but has no proof, which I cannot grade"),
        *(r"Grade: \boxed{3}. The response had \boxed{10}", '{"verdict": "right", "steps": 10}', '{"grade": "10"}'),
    ],
)
def test_a_judge_without_a_grade_in_its_range_is_an_error_and_not_a_reward(said: str) -> None:
    with pytest.raises(InvalidArgument, match="judge"):
        judge.grade(said, 10.0)


def test_every_scorer_of_headraces_own_has_a_boxed_form() -> None:
    registry = Registry.of("boxed_f1", None)
    for scorer in registry.all():
        assert registry.require(f"boxed_{scorer.name}").boxed
    assert registry.default == "boxed_f1"
