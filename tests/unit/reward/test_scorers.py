"""Each scorer against answers as models give them."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.registry import TooSlow, cpu_limit
from services.reward.scorers import dapo, deepscaler, exact_match, math, regex
from services.reward.scorers import reasoning_gym as gym_scorer
from services.reward.scorers.answers import after_thinking, boxed, last_line, tagged


def item(response: str, label: str | None = None, **metadata: object) -> ScoreItem:
    return ScoreItem(item_id="1", prompt="", response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("label", "message"), [(None, "has none: set --label-key"), ("", "none"), ("$$", "cannot read")]
)
def test_math_needs_a_label_that_is_mathematics(label: str | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        math.score(item("7", label))


def test_exact_match_needs_a_label() -> None:
    with pytest.raises(InvalidArgument, match="--label-key"):
        exact_match.score(item("yes"))


def test_regex_needs_a_pattern_that_compiles() -> None:
    with pytest.raises(InvalidArgument, match=r"cannot compile '\('"):
        regex.score(item("x", "("))
    with pytest.raises(InvalidArgument, match=r"metadata\.pattern or the label"):
        regex.score(item("x"))


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "word_sorting"])
def test_reasoning_gym_scores_are_the_packages_own(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, size=4, seed=3)
    for entry in dataset:
        travelled = json.loads(json.dumps(entry))
        for answer in (entry["answer"], entry["answer"] + "1", "", "no idea"):
            mine = gym_scorer.score(item(answer, reasoning_gym=travelled, answer_format="all"))
            assert mine == dataset.score_answer(answer, entry), (task, answer)
        told = gym_scorer.score(item(f"Well.\n<answer>{entry['answer']}</answer>", reasoning_gym=json.dumps(entry)))
        assert told == dataset.score_answer(entry["answer"], entry) == 1.0


def test_reasoning_gym_refuses_what_it_cannot_judge() -> None:
    entry = {"answer": "1", "metadata": {"source_dataset": "chain_sun"}}
    with pytest.raises(InvalidArgument, match="no task 'chain_sun'"):
        gym_scorer.score(item("1", reasoning_gym=entry))
    with pytest.raises(InvalidArgument, match="entry that the package made"):
        gym_scorer.score(item("1"))
    entry["metadata"]["source_dataset"] = "chain_sum"
    with pytest.raises(InvalidArgument, match="use tag, boxed, last_line or all"):
        gym_scorer.score(item("1", reasoning_gym=entry, answer_format="xml"))


def gym_reward(entry: dict[str, Any], answer: str) -> float | str:
    """The reward, or the error of a sample that would fail."""
    try:
        return gym_scorer.score(item(answer, reasoning_gym=entry, answer_format="all"))
    except Exception as error:  # noqa: BLE001 - any of them would fail the sample
        return f"{type(error).__name__}: {error}"


def test_an_answer_that_a_task_of_reasoning_gym_cannot_read_is_a_low_reward_and_no_failure() -> None:
    tasks = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})  # composite is made of others
    texts = ("²", '{"a": {"b": 1}}', "[null]", "-1e400", '{"0": 1}')
    failed, paid = [], []
    for task in tasks:
        entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=11)[0], default=str))
        for text in texts:
            reward = gym_reward(entry, text)
            if isinstance(reward, str):
                failed.append((task, text[:20], reward))
            elif not 0 <= reward < 1:
                paid.append(task)
    assert failed == []
    # Every answer that does not contain "true" is taken for "this halts not", and that is right for this entry.
    assert set(paid) <= {"game_of_life_halting"}


def test_answers_are_found_where_they_are() -> None:
    assert boxed(r"\boxed{a{b}c} and \fbox{d}") == "d"
    assert boxed(r"\boxed{a{b}c} and \boxed{open") == "a{b}c"
    assert boxed("nothing") is None
    assert tagged("<answer>1</answer><answer>\n2 </answer>") == "2"
    assert last_line("a\n b \n\n") == "b"
    assert last_line("") == ""
    assert after_thinking("<think>a</think>b") == "b"


def table() -> list[dict[str, str]]:
    return [json.loads(line) for line in (Path(__file__).parent / "math_answers.jsonl").read_text().splitlines()]


def test_the_table_of_answers_is_graded_as_it_says() -> None:
    """Each row: a label, an answer, whether it is right, and why."""
    rows = table()
    assert len(rows) >= 300
    assert len({(row["label"], row["answer"]) for row in rows}) == len(rows)
    with cpu_limit(120):  # instead of a test that never ends
        graded = [math.score(item(row["answer"], row["label"])) for row in rows]
    assert [row for row, score in zip(rows, graded, strict=True) if score != (row["verdict"] == "right")] == []


BOMBS = [
    *("9^{9^{9}}", "(" * 80 + "1" + ")" * 80, "9**9**9", "99999999!", "((9!)!)!", "(2^{9999}+1)^{9999}"),
    *(r"\binom{10^9}{10^8}", "x^{9999}y^{9999}+(x+y)^{9999}", r"\sqrt{9000!}+\sqrt{2}", r"(1+i)^{9999}"),
    *("9^{999}" * 30, "+".join(["5 or more"] * 200), "Answer: 6. No " * 300, "{" * 100_000, r"\boxed{" * 15_000),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_what_nobody_can_write_down_is_wrong_at_once(bomb: str) -> None:
    for response, label in ((rf"\boxed{{{bomb}}}", "5"), (bomb, r"\sqrt{2}")):
        with cpu_limit(20):  # a bomb takes minutes or never ends; the others take up to 2 s of a slow processor
            assert math.score(item(response, label)) == 0.0


def test_dapo_and_deepscaler_read_the_same_answers_as_math() -> None:
    def by_dapo(response: str, label: str) -> float:
        return dict(dapo.score(item(response, label)))["acc"]  # type: ignore[arg-type]

    assert by_dapo("Answer: 5. No wait, Answer: 6", "6") == 1.0
    assert by_dapo("Answer: 5. No wait, Answer: 6", "5") == 0.0
    for answer, label, right in ((r"7\mathrm{i}", "7", 0), ("2 million", "2000000", 1), ("4+3 i", "4+3i", 1)):
        assert by_dapo(f"Answer: {answer}", label) == right
        assert deepscaler.score(item(rf"</think>\boxed{{{answer}}}", label)) == right


@cpu_limit(0.05)
def _computes_for_ever() -> None:
    while True:
        with suppress(Exception):  # as libraries do
            sum(range(1000))


@cpu_limit(0.05)
def _gives_up_in_time() -> float:
    try:
        while True:
            sum(range(1000))
    except BaseException:  # noqa: BLE001 - as some tasks of reasoning_gym do
        return 0.0


def test_a_result_of_a_calculation_that_was_cut_short_does_not_count() -> None:
    with pytest.raises(TooSlow):
        _gives_up_in_time()


def test_processor_time_is_limited_and_waiting_is_not() -> None:
    with pytest.raises(TooSlow):
        _computes_for_ever()
    with cpu_limit(0.05):
        threading.Event().wait(0.2)
