"""The user's buffer_filter and data source classes, in worker processes, over a real ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, FailedPrecondition
from headrace.hooks import HookArgs
from headrace.protobuf import raw_put
from services.buffer import wire
from services.buffer.ledger.group import GroupState, Prompt
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import GroupPut, PutOutcome
from services.buffer.ledger.stream import Selection, StreamConfig
from services.buffer.ledger.train import StepBatch
from services.buffer.runtime.application import BufferApplication
from services.buffer.runtime.user_code import UserCode
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import completed_sample

SEEN_BY_SLIME = """
def pop_first(args, rollout_id, buffer, num_samples):
    chosen = buffer[:num_samples]
    del buffer[:num_samples]
    return chosen

def longest_label(args, buffer, num_samples):
    buffer[:] = [sample for sample in buffer if sample.label != "never"]
    return sorted(buffer, key=lambda s: len(s.label), reverse=True)[:num_samples]

def raising(args, buffer, num_samples):
    raise KeyError("oops")

def endless(args, buffer, num_samples):
    while True:
        pass

def too_many(args, buffer, num_samples):
    return buffer

def needs_more(args, buffer, num_samples, another, and_another):
    return []
"""


@asynccontextmanager
async def opened(
    store: Store, folder: Path, function: str | None = None, seconds: float = 120.0, **config: object
) -> AsyncIterator[BufferApplication]:
    path = f"{folder}/mine.py:{function}" if function else None
    buffer = await BufferApplication.open(store, user_code=UserCode(HookArgs({"who": "me"}), path, seconds, folder))
    selection = Selection.HOOK if function else Selection.FIFO
    fields = {"max_staleness": None, "selection": selection, **config}
    await buffer.create_stream(StreamConfig("train", 1, 2, **fields))  # type: ignore[arg-type]
    try:
        yield buffer
    finally:
        await buffer.close()


async def ready(buffer: BufferApplication, *labels: str, policy_version: int = 0) -> None:
    """A READY group for each label."""
    prompts = [sample_pb2.Prompt(prompt_id=label, text="?", label=label) for label in labels]
    await buffer.submit("train", [Prompt(p.prompt_id, p.SerializeToString()) for p in prompts])
    await put_all(buffer, policy_version)


async def put_all(buffer: BufferApplication, policy_version: int = 0) -> list[str]:
    """Leases and puts what there is; the prompts' texts."""
    groups, _ = await buffer.lease("train", "me", f"request-{buffer.ledger.position}", 100, 0.0, 0)
    leases = [wire.lease_to_proto(group, 1.0, 1, []) for group in groups]
    await buffer.put([await wire.put_from_proto(raw_put(labelled_put(lease, policy_version))) for lease in leases])
    return [lease.prompt.text for lease in leases]


def labelled_put(lease: pb.GroupLease, policy_version: int) -> pb.GroupPut:
    sample = replace(completed_sample(lease, 0, policy_version), label=lease.prompt.label)
    return pb.GroupPut(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        outcome=pb.PUT_OUTCOME_COMPLETE,
        samples=[sample.pack()],
    )


def labels(batch: StepBatch | None) -> list[str]:
    assert batch is not None
    return [group.prompt.prompt_id for group in batch.groups]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SEEN_BY_SLIME)
    return tmp_path


async def test_a_users_function_chooses_the_batch_and_the_choice_is_durable(folder: Path) -> None:
    store = MemoryStore()
    async with opened(store, folder, "longest_label") as buffer:
        await ready(buffer, "a", "never", "ccc", "bb", "dddd")
        epoch, _ = await buffer.rewind("train", 0, "one", 0)
        batch, _ = await buffer.lease_batch("train", epoch, 0, 0.0)
        assert labels(batch) == ["dddd", "ccc"]
        dropped = [g for g in buffer.ledger.stream("train").groups.values() if g.state is GroupState.DROPPED]
        assert [(g.prompt.prompt_id, g.failure.reason) for g in dropped if g.failure] == [("never", "BUFFER_FILTER")]
    async with opened(store, folder, "pop_first") as buffer:
        assert labels((await buffer.lease_batch("train", epoch, 0, 0.0))[0]) == ["dddd", "ccc"]
        await buffer.commit(Ledger.consume, "train", epoch, 0, batch.digest)
        assert labels((await buffer.lease_batch("train", epoch, 1, 0.0))[0]) == ["a", "bb"]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raising", "KeyError: 'oops'"),
        ("endless", "did not end within 0.5 s|0.5 s"),
        ("too_many", "returned 3 samples; it must return a list of at most 2"),
    ],
)
async def test_a_function_that_fails_says_so_to_the_trainer_and_the_ledger_goes_on(
    folder: Path, function: str, complaint: str
) -> None:
    async with opened(MemoryStore(), folder, function, seconds=0.5 if function == "endless" else 120.0) as buffer:
        await ready(buffer, "a", "b", "c")
        epoch, _ = await buffer.rewind("train", 0, "one", 0)
        with pytest.raises(FailedPrecondition, match=complaint) as refused:
            await buffer.lease_batch("train", epoch, 0, 0.0)
        assert refused.value.reason == "BUFFER_FILTER_FAILED"
        assert buffer.ledger.stream("train").counts[GroupState.READY] == 3


async def test_a_function_with_other_arguments_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_samples"):
        async with opened(MemoryStore(), folder, "needs_more"):
            pass


SOURCES = """
import json, pathlib
from headrace.hooks import Sample

class Counting:
    def __init__(self, args):
        assert args.who == "me"
        self.next = 0

    def get_samples(self, n):
        n = min(n, 10 - self.next)
        self.next += n
        return [[Sample(prompt=f"q{i}", metadata={"i": i})] for i in range(self.next - n, self.next)]

class Keeping(Counting):
    def __init__(self, args):
        super().__init__(args)
        self.back = []

    def get_samples(self, n):
        again, self.back = self.back[:n], self.back[n:]
        return again + super().get_samples(n - len(again))

    def add_samples(self, samples):
        self.back += samples

    def save(self, rollout_id):
        prompts = [group[0].prompt for group in self.back]
        pathlib.Path(__file__).with_name(f"state-{rollout_id}.json").write_text(json.dumps([self.next, prompts]))

    def load(self, rollout_id):
        text = pathlib.Path(__file__).with_name(f"state-{rollout_id}.json").read_text()
        self.next, prompts = json.loads(text)
        self.back = [[Sample(prompt=prompt)] for prompt in prompts]

class Silent:
    pass
"""


@pytest.mark.parametrize("kind", ["Counting", "Keeping"])
async def test_a_data_source_gives_every_prompt_once_across_restarts_of_the_buffer(tmp_path: Path, kind: str) -> None:
    (tmp_path / "sources.py").write_text(SOURCES)
    store, texts = MemoryStore(), []
    for _ in range(2):
        source = f"{tmp_path}/sources.py:{kind}"
        async with opened(store, tmp_path, data_source=source, max_leases=5) as buffer:
            groups, _ = await buffer.lease("train", "me", f"request-{len(texts)}", 5, 0.0, 0)
            prompts = [wire.prompt_to_proto(group.prompt) for group in groups]
            texts += [prompt.text for prompt in prompts]
            failures = [GroupPut(g.lease.lease_id, g.group_id, PutOutcome.DROPPED) for g in groups if g.lease]
            await buffer.put(failures)
    assert texts == [f"q{i}" for i in range(10)]
    assert prompts[0].metadata_json == '{"i":5}'


async def test_a_class_that_is_no_data_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sources.py").write_text(SOURCES)
    with pytest.raises(ConfigError, match=r"has no get_samples\(n\)"):
        async with opened(MemoryStore(), tmp_path, data_source=f"{tmp_path}/sources.py:Silent"):
            pass
