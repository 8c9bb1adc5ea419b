"""Ways in which trainers elsewhere lose rollouts, or train on the wrong ones: each is a sentence here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.protobuf import raw_put
from services.buffer import wire
from services.buffer.ledger.produce import GroupPut, PutOutcome
from services.buffer.ledger.stream import FileSource, StreamConfig
from services.buffer.runtime.application import BufferApplication
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, sample


def test_groups_are_formed_by_id_and_not_by_the_shape_of_what_came(tmp_path: Path) -> None:
    it = LedgerUnderTest()
    it.create(groups_per_step=3)
    it.submit("a", "b", "c")
    epoch, groups = it.rewind(), it.lease()
    sizes = {"train/0": 2, "train/1": 5, "train/2": 3}  # fan-out: more samples than asked, and uneven
    puts = [
        GroupPut(
            group.lease.lease_id,
            group.group_id,
            PutOutcome.COMPLETE,
            tuple(sample(group, i, 0) for i in range(sizes[group.group_id])),
        )
        for group in (groups[2], groups[0], groups[1])
        if group.lease
    ]
    it.do(it.ledger.put(it.now, puts))
    batch = it.consume(epoch, 0)
    assert {group.group_id: len(group.samples) for group in batch.groups} == sizes
    for group in batch.groups:
        assert all(record.sample_id.startswith(f"{group.group_id}#") for record in group.samples)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_resumed_run_skips_no_prompt_and_repeats_none(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(20)))
    file = FileSource(str(path), "prompt", shuffle=True, num_epochs=1, streaming=streaming)
    config = StreamConfig("train", 2, 2, max_staleness=None, files=(file,))
    seen: list[str] = []
    for chunk in (3, 1, 7, 9):
        buffer = await BufferApplication.open(SqliteStore(tmp_path / "ledger"))
        await buffer.create_stream(config)
        groups, _ = await buffer.lease("train", "me", f"request-{len(seen)}", chunk, 0.0, 0)
        await buffer.close()
        seen += [wire.prompt_to_proto(group.prompt).text for group in groups]
    assert sorted(seen) == sorted(f"q{i}" for i in range(20))


@pytest.mark.parametrize("status", [sample_pb2.SAMPLE_STATUS_ABORTED, sample_pb2.SAMPLE_STATUS_PENDING])
async def test_a_group_with_an_unfinished_sample_is_refused_whatever_else_it_holds(status: int) -> None:
    lease = pb.GroupLease(lease_id="l", group_id="train/0", n_samples=3, prompt=sample_pb2.Prompt(text="?"))
    put = complete_put(lease, 0)
    put.samples[1].envelope.status = status  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match=r"l/1 is not finished, .* release the lease with partial_samples"):
        await wire.put_from_proto(raw_put(put))


@pytest.mark.parametrize("num_deleted", [1, 2, 1_500])
def test_groups_of_a_deleted_stream_that_are_still_there_are_not_the_next_ones(num_deleted: int) -> None:
    """Nothing was purged before the next stream of the name is there, nor before a restart."""
    it = LedgerUnderTest()
    it.create(max_staleness=None)
    it.submit(*(f"{i}" for i in range(num_deleted)))
    leases = it.do(it.ledger.lease(it.now, "train", "p", "request", 1_000))
    lease_ids = [group.live_lease.lease_id for group in leases]
    it.do(it.ledger.delete_stream(it.now, "train", force=True))
    it.create(max_staleness=None)
    assert it.ledger.renew(it.now, lease_ids) == ([], lease_ids)
    assert it.do(it.ledger.lease(it.now, "train", "p", "request", 1_000)) == []
    kept = it.submit("0")
    for _ in range(2):
        it.restart()
        assert sorted(it.states()) == kept
        assert it.ledger.renew(it.now, lease_ids) == ([], lease_ids)
    it.do(it.ledger.delete_stream(it.now, "train", force=True))
    it.restart()
    while it.do(it.ledger.purge_deleted(it.now, "train")):
        pass
    assert it.store.load().groups == ()
