"""A client's part of an upgrade, as either release runs it: it imports what both have, and no test's support.

`python driver.py begin|go_on ADDRESS FOLDER`. `begin` leaves groups in every state and writes what it knows to
FOLDER/facts.json; `go_on`, over the same ledger and perhaps with another release on either side, does the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.trajectory import PolicyRange, Sample, Status
from services.trainer.plan.batch import Batch

try:
    from services.trainer.data.buffer import TrainingRecord
except ModuleNotFoundError:  # where v0.1.0 has it
    from services.trainer.data.record import TrainingRecord  # type: ignore[import-not-found,no-redef]

STREAM = "upgraded"
NUM_PROMPTS = 12
LARGE = 1 << 19
"""Values of a column that travels out of line."""


async def begin(client: BufferClient, folder: Path) -> None:
    """Steps 0 and 1 are trained, and 0 is committed; then groups that are ready, leased, failed, dropped and queued."""
    record = TrainingRecord(folder / "trained.jsonl")
    await client.create_stream(
        pb.StreamConfig(name=STREAM, n_samples_per_prompt=2, groups_per_step=2, max_staleness=8, max_attempts=1)
    )
    prompts = [sample_pb2.Prompt(prompt_id=f"q{i}", text=f"What is {i}?") for i in range(NUM_PROMPTS)]
    await client.submit_prompts(STREAM, prompts)
    epoch = (await client.rewind(STREAM, 0)).epoch
    for step in range(2):
        await _put(client, (await client.lease_groups(STREAM, "p", 2)).leases)
        await _train(client, record, epoch, step)
    await client.commit(STREAM, epoch, 1)
    ready, held, failed, dropped = (await client.lease_groups(STREAM, "p", 4)).leases
    await _put(client, [ready], large=True)
    await client.put_groups([_without(failed, pb.PUT_OUTCOME_FAILED), _without(dropped, pb.PUT_OUTCOME_DROPPED)])
    batch = json.loads((folder / "trained.jsonl").read_text().splitlines()[-1])
    kept = [*batch["sample_ids"], *(f"{ready.lease_id}/{index}" for index in range(2))]
    facts = {
        "held": held.SerializeToString().hex(),
        "batch": batch["sample_ids"],
        "samples": await _digests(client, kept),
        "states": await _states(client),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


async def go_on(client: BufferClient, folder: Path) -> None:
    """Everything is as it was left; the leased group is put by its old lease, and steps 1 to 4 are trained."""
    facts = json.loads((folder / "facts.json").read_text())
    assert await _states(client) == facts["states"]
    assert await _digests(client, list(facts["samples"])) == facts["samples"]
    await _put(client, [pb.GroupLease.FromString(bytes.fromhex(facts["held"]))])
    record = TrainingRecord(folder / "trained.jsonl")
    epoch = (await client.rewind(STREAM, 1)).epoch
    assert await _train(client, record, epoch, 1) == facts["batch"], "the same batch"
    await _train(client, record, epoch, 2)
    for step in (3, 4):
        await _put(client, (await client.lease_groups(STREAM, "p", 2)).leases)
        await _train(client, record, epoch, step)
    await client.commit(STREAM, epoch, 5)
    left = list((await _states(client)).values())
    assert left == ["COMMITTED"] * 6 + ["FAILED", "DROPPED"] + ["COMMITTED"] * 4, left


async def _train(client: BufferClient, record: TrainingRecord, epoch: int, step: int) -> list[str]:
    """Returns the batch's samples in training order."""
    reply = await client.lease_batch(STREAM, epoch, step, timeout_seconds=30)
    record.append(step, Batch.of(reply))
    await client.consume(STREAM, epoch, step, reply.digest)
    await client.set_policy_version(STREAM, epoch, step + 1)
    return [sample.sample_id for group in reply.groups for sample in group.samples]


async def _put(client: BufferClient, leases: Sequence[pb.GroupLease], *, large: bool = False) -> None:
    puts = [
        pb.GroupPut(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            outcome=pb.PUT_OUTCOME_COMPLETE,
            samples=[_sample(lease, index, large).pack() for index in range(lease.n_samples)],
        )
        for lease in leases
    ]
    results = await client.put_groups(puts)
    assert not any(result.HasField("refused") for result in results), results


def _sample(lease: pb.GroupLease, index: int, large: bool) -> Sample:
    extra = {"extra": np.arange(LARGE, dtype=np.float32)} if large else {}
    return Sample(
        sample_id=f"{lease.lease_id}/{index}",
        group_id=lease.group_id,
        index=index,
        prompt=lease.prompt.text,
        response="ok",
        tokens=np.array([1, 2, 3, 10 + index, 5], np.int32),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.zeros(2, np.float32),
        status=Status.COMPLETED,
        reward=float(index),
        policy_ranges=[PolicyRange(lease.policy_version, 0, 2)],
        columns=extra,
    )


def _without(lease: pb.GroupLease, outcome: Any) -> pb.GroupPut:
    failure = sample_pb2.Failure(reason="ENGINE_DOWN", message="nobody answered")
    return pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=outcome, failure=failure)


async def _states(client: BufferClient) -> dict[str, str]:
    groups = (await client.list_groups(STREAM)).groups
    names = {each.group_id: pb.GroupState.Name(each.state).removeprefix("GROUP_STATE_") for each in groups}
    return dict(sorted(names.items(), key=lambda item: int(item[0].rpartition("/")[2])))


async def _digests(client: BufferClient, sample_ids: Sequence[str]) -> dict[str, str]:
    """Of whole payloads, as a trainer gets them."""
    samples = await client.fetch_samples(STREAM, sample_ids)
    return {sample.envelope.sample_id: hashlib.sha256(sample.payload).hexdigest() for sample in samples}


async def main(order: str, address: str, folder: Path) -> None:
    """One of the two parts, as its own process or in a test's."""
    async with BufferClient(address, deadline_seconds=60.0) as client:
        await {"begin": begin, "go_on": go_on}[order](client, folder)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
