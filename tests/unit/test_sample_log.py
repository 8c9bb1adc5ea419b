"""What the policy answered stays readable: the run's sample log, its bound, and what a kill leaves of it."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest

from headrace.sample_log import Answer, SampleLog, TokenColumns
from headrace.trajectory import Failure
from tests.support.ledgers.answers import answered

MEGABYTE = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> SampleLog:
    return SampleLog(tmp_path / "samples")


def test_a_step_is_read_as_it_was_written(log: SampleLog) -> None:
    sample = answered(
        "g1/0", "2 + 2 =", " 4\n\x00𝄞", reward=0.5, reward_parts={"form": 1.0}, label="4", metadata={"a": 1}
    )
    assert log.write_step(3, 0, [Answer.of(sample, 3)], MEGABYTE) == 1
    (read,) = log.of_step(3)
    assert (read.prompt, read.response, read.label, read.metadata) == ("2 + 2 =", " 4\n\x00𝄞", "4", '{"a":1}')
    assert (read.reward, read.reward_parts, read.scorer, read.scorer_version) == (0.5, {"form": 1.0}, "math", "7")
    assert (read.prompt_tokens, read.response_tokens, read.trained_tokens, read.step) == (3, 2, 2, 3)
    assert list(read.policy_ranges) == [(1, 0, 2)]


def test_ranks_of_a_step_are_read_together_and_each_sample_once(log: SampleLog) -> None:
    log.write_step(1, 0, [Answer.of(answered("a"), 1)], MEGABYTE)
    log.write_step(1, 1, [Answer.of(answered("b"), 1)], MEGABYTE)
    log.write_step(1, 0, [Answer.of(answered("a"), 1), Answer.of(answered("b"), 1)], MEGABYTE)  # again, by one rank
    assert sorted(each.sample_id for each in log.of_step(1)) == ["a", "b"]


def test_the_oldest_steps_go_when_the_folder_is_full(log: SampleLog) -> None:
    for step in range(1, 40):
        log.write_step(step, 0, [Answer.of(answered(f"{step}", response=noise(20_000, step)), step)], MEGABYTE // 4)
    steps = log.steps()
    assert steps == list(range(steps[0], 40))
    assert 1 < steps[0] < 39
    assert in_bytes(log.folder) <= MEGABYTE // 4


def test_tokens_are_read_once_and_have_a_quarter_of_the_folder(log: SampleLog) -> None:
    log.write_tokens(1, 0, [columns("a")], MEGABYTE)
    log.write_tokens(1, 1, [columns("b")], MEGABYTE)
    log.write_tokens(1, 0, [columns("a"), columns("b")], MEGABYTE)
    assert sorted(log.tokens_of(1), key=lambda each: each.sample_id) == [columns("a"), columns("b")]
    for step in range(2, 40):
        log.write_tokens(step, 0, [columns(f"{step}", seed=step, length=5_000)], MEGABYTE)
    assert not list(log.tokens_of(1))
    assert list(log.tokens_of(39)) == [columns("39", seed=39, length=5_000)]
    assert in_bytes(log.folder) <= MEGABYTE // 4


def columns(sample_id: str, *, seed: int = 0, length: int = 2) -> TokenColumns:
    noise = random.Random(seed)
    return TokenColumns(
        sample_id,
        tokens=[noise.randrange(50_000) for _ in range(length + 1)],
        loss_mask=[1] * length,
        engine_log_probs=[round(-noise.random(), 4) for _ in range(length)],
        trainer_log_probs=[None] * length,
        advantages=[],
    )


def test_a_step_that_is_larger_than_the_folder_is_cut(log: SampleLog) -> None:
    many = [Answer.of(answered(f"{number}", response=noise(5_000, number)), 1) for number in range(400)]
    written = log.write_step(1, 0, many, MEGABYTE)
    assert 0 < written < 400
    assert len(list(log.of_step(1))) == written
    assert in_bytes(log.folder) <= MEGABYTE


def test_evaluated_samples_are_read_by_step_replaced_by_a_new_evaluation_and_bounded(log: SampleLog) -> None:
    for step in range(1, 60):
        for is_new in (True, False):
            one = Answer.of(answered(f"{step}/{is_new}", response=noise(4_000, step)), step)
            assert log.write_evaluated(step, [one], MEGABYTE, is_new=is_new) == 1
    steps = log.evaluations()
    assert steps == list(range(steps[0], 60))
    assert 1 < steps[0] < 58
    assert in_bytes(log.folder) <= MEGABYTE // 10
    assert [each.sample_id for each in log.of_evaluation(59)] == ["59/True", "59/False"]
    log.write_evaluated(59, [Answer.of(answered("again"), 59)], MEGABYTE, is_new=True)
    assert [each.sample_id for each in log.of_evaluation(59)] == ["again"]
    assert not log.is_empty()


def test_what_a_kill_tore_is_read_up_to_there(log: SampleLog) -> None:
    file = log.new_untrained_file()
    for number in range(3):
        log.write_untrained(file, [Answer.of(answered(f"{number}", failure=Failure("X", "y")))], MEGABYTE)
    file.write_bytes(file.read_bytes()[:-5])
    assert [each.sample_id for each in log.failed()][:2] == ["0", "1"]
    behind = log.new_untrained_file()
    assert behind != file
    log.write_untrained(behind, [Answer.of(answered("9", failure=Failure("X", "y")))], MEGABYTE)
    assert [each.sample_id for each in log.failed()][:3] == ["9", "0", "1"]


def noise(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.printable, k=length))


def in_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
