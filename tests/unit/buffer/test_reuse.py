"""What was generated comes to `add_samples`, and what `buffer_filter` chooses of it is trained once more.

The classes are those that slime's documents print, but for their imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import FailedPrecondition
from headrace.trajectory import Sample as WireSample
from services.buffer.ledger.group import GroupState
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.documents import snippet
from tests.support.ledgers.reusing_run import running

IMPORTS = "from headrace.hooks import Sample\n"
SELECT_BEST = """
def select_best(buffer, num_samples):
    return sorted(buffer, key=lambda s: s.reward, reverse=True)[:num_samples]
"""
PRINTED = {
    "of the reference": ("RolloutDataSource (Base Class)", "Buffered Data Source (Off-Policy)"),
    "of the guide": ("Basic Data Source", "Buffered Data Source"),
}


@pytest.fixture(params=PRINTED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    printed = "".join(snippet(heading, "") for heading in PRINTED[request.param])
    (tmp_path / "mine.py").write_text(IMPORTS + SELECT_BEST + printed)
    return tmp_path


def texts(samples: Sequence[WireSample]) -> list[str]:
    return [sample.prompt for sample in samples]


async def test_printed_classes_train_once_more_what_was_generated_with_what_it_was_generated_with(folder: Path) -> None:
    async with running(MemoryStore(), folder) as run:
        assert await run.produce() == ["q0", "q1"]
        fresh = await run.train()
        assert texts(fresh) == ["q0", "q0", "q1", "q1"]
        assert [sample.label for sample in fresh] == ["a0", "a0", "a1", "a1"]
        assert await run.produce() == []  # its places go to what the filter chooses: the best rewards come first
        again = await run.train()
        assert texts(again) == ["q1", "q1", "q0", "q0"]
        assert await run.produce() == ["q2", "q3"]
        for sample in again:
            (before,) = [s for s in fresh if s.sample_id == sample.tags["reused_from"]]
            assert sample.sample_id != before.sample_id
            assert sample.group_id != before.group_id
            assert sample.rollout_id == sample.sample_id
            assert (sample.tokens.tolist(), sample.reward) == (before.tokens.tolist(), before.reward)
            assert sample.rollout_log_probs.tolist() == before.rollout_log_probs.tolist()
            assert (sample.policy_ranges, sample.label) == (before.policy_ranges, before.label)


async def test_a_group_is_trained_at_most_once_more_and_never_beyond_the_staleness_bound(tmp_path: Path) -> None:
    trained: list[tuple[int, WireSample]] = []
    async with running(MemoryStore(), tmp_path, "headrace.hooks.RolloutDataSourceWithBuffer", max_staleness=3) as run:
        for _ in range(12):
            await run.produce()
            step = run.step
            trained += [(step, sample) for sample in await run.train()]
    for step, sample in trained:
        assert all(0 <= step - versions.policy_version <= 3 for versions in sample.policy_ranges)
    origins = [sample.tags["reused_from"] for _, sample in trained if "reused_from" in sample.tags]
    assert len(set(origins)) == len(origins) >= 8
    fresh = {sample.sample_id for _, sample in trained if "reused_from" not in sample.tags}
    assert set(origins) <= fresh | {s.sample_id for _, s in trained}


async def test_what_was_generated_is_given_again_to_a_class_whose_process_or_buffer_ended(folder: Path) -> None:
    path = folder / "ledger"
    async with running(SqliteStore(path), folder) as run:
        assert await run.produce() == ["q0", "q1"]
        await run.train()
    async with running(SqliteStore(path), folder) as run:  # the class had its list in memory alone
        assert await run.produce() == []
        assert texts(await run.train()) == ["q1", "q1", "q0", "q0"]
        assert await run.produce() == ["q2", "q3"]
        assert texts(await run.train()) == ["q2", "q2", "q3", "q3"]


FINISHED = """
from headrace.hooks import Sample

class Recorded:
    '''Brings samples of another run: nobody generates.'''
    def __init__(self, args):
        self.next = 0

    def get_samples(self, n):
        groups = [[self.made(self.next + i, k) for k in range(2)] for i in range(n)]
        self.next += n
        return groups

    def made(self, i, k):
        return Sample(prompt=f"r{i}", tokens=[1, 2, 3, 4], response_length=2, response="ok", reward=float(k),
                      loss_mask=[1, 0], rollout_log_probs=[-0.5, 0.0], weight_versions=["0"],
                      status=Sample.Status.COMPLETED)

class Half(Recorded):
    def get_samples(self, n):
        return [group[:1] for group in super().get_samples(n)]
"""


async def test_a_class_may_bring_finished_groups_and_nobody_generates_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FINISHED)
    async with running(MemoryStore(), tmp_path, "Recorded", max_staleness=5) as run:
        assert await run.produce() == []
        samples = await run.train()
        assert texts(samples) == ["r0", "r0", "r1", "r1"]
        assert [sample.reward for sample in samples] == [0.0, 1.0, 0.0, 1.0]
        assert samples[0].loss_mask.tolist() == [1, 0]
        assert [len({sample.group_id for sample in samples}), len({s.sample_id for s in samples})] == [2, 4]


async def test_finished_groups_that_cannot_be_trained_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FINISHED)
    async with running(MemoryStore(), tmp_path, "Half") as run:
        with pytest.raises(FailedPrecondition, match="brought 1 finished samples for mine.py:Half#1"):
            await run.produce()
        assert not run.buffer.ledger.stream("train").counts[GroupState.READY]


CHOOSING = """
import copy
from headrace.hooks import RolloutDataSourceWithBuffer, Sample

class Own(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args, buffer, num_samples):
        chosen = copy.deepcopy(buffer[1])  # one sample of the first group, as a copy
        chosen.reward, chosen.metadata["why"] = 9.0, "mine"
        return [chosen]

class Groups(RolloutDataSourceWithBuffer):
    def add_samples(self, samples: list[list[Sample]]):
        assert [len(group) for group in samples] == [2]
        self.buffer += samples

    def buffer_filter(self, args, rollout_id, buffer, num_samples):
        assert (rollout_id, num_samples) == (1, 2), (rollout_id, num_samples)
        return buffer[-1:]

class Listless(RolloutDataSourceWithBuffer):
    def add_samples(self, samples):
        self.buffer = tuple(samples)
"""


@pytest.fixture
def choosing(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CHOOSING)
    return tmp_path


async def test_one_chosen_sample_brings_its_whole_group_and_its_new_reward(choosing: Path) -> None:
    async with running(MemoryStore(), choosing, "Own") as run:
        await run.produce()
        await run.train()
        assert await run.produce() == ["q2"]  # of two places one is left
        again = await run.train()
        assert texts(again) == ["q0", "q0", "q2", "q2"]
        assert [sample.reward for sample in again] == [0.0, 9.0, 2.0, 2.5]
        assert [dict(sample.metadata) for sample in again[:2]] == [{}, {"why": "mine"}]


async def test_a_class_of_slimes_own_form_gets_groups_and_the_step(choosing: Path) -> None:
    async with running(MemoryStore(), choosing, "Groups") as run:
        await run.produce()
        await run.train()
        assert await run.produce() == ["q2"]
        assert texts(await run.train()) == ["q1", "q1", "q2", "q2"]


async def test_a_class_that_chooses_wrongly_says_so_to_producers(choosing: Path) -> None:
    async with running(MemoryStore(), choosing, "Listless") as run:
        await run.produce()
        await run.train()
        with pytest.raises(FailedPrecondition, match="has a buffer_filter and no list self.buffer"):
            await run.produce()
