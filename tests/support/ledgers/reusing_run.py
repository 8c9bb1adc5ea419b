"""A buffer whose prompts come from a data source, and one who produces and trains at it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.protobuf import raw_put
from headrace.trajectory import Sample as WireSample
from services.buffer import wire
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.stream import ExpiryAction, StreamConfig
from services.buffer.ledger.train import StepBatch
from services.buffer.runtime.application import BufferApplication
from services.buffer.runtime.user_code import UserCode
from services.buffer.store.base import Store
from tests.support.ledgers.buffer_samples import completed_sample


class ReusingRun:
    """A trainer and a producer of one prompt file; prompt k's two samples have the rewards k and k + 0.5."""

    def __init__(self, buffer: BufferApplication, epoch: int, step: int = 0) -> None:
        self.buffer, self.epoch, self.step = buffer, epoch, step

    async def produce(self) -> list[str]:
        """Leases all that may be begun, and puts it with the served version; the prompts' texts."""
        groups, _ = await self.buffer.lease("train", "me", f"request-{self.buffer.ledger.position}", 100, 0.0, 0)
        leases = [wire.lease_to_proto(group, 1.0, 2, []) for group in groups]
        await self.buffer.put([await wire.put_from_proto(raw_put(self._put(lease))) for lease in leases])
        return [lease.prompt.text for lease in leases]

    async def train(self) -> list[WireSample]:
        """The samples of the next step's batch, which is consumed; its weights are served then."""
        batch, _ = await self.buffer.lease_batch("train", self.epoch, self.step, 0.0)
        assert batch is not None
        samples = await self.samples(batch)
        await self.buffer.commit(Ledger.consume, "train", self.epoch, self.step, batch.digest)
        self.step += 1
        await self.buffer.set_policy_version("train", self.epoch, self.step)
        return samples

    async def samples(self, batch: StepBatch) -> list[WireSample]:
        records = [record for group in batch.groups for record in group.samples]
        payloads = await self.buffer.payloads(records)
        return [WireSample.unpack(wire.sample_to_proto(*pair)) for pair in zip(records, payloads, strict=True)]

    def _put(self, lease: pb.GroupLease) -> pb.GroupPut:
        number = float(lease.prompt.text.removeprefix("q"))
        samples = [
            replace(
                completed_sample(lease, index, self.step),
                reward=number + index / 2,
                label=lease.prompt.label,
                rollout_log_probs=np.array([-number - 1, -index - 1], np.float32),
            )
            for index in range(2)
        ]
        packed = [sample.pack() for sample in samples]
        return pb.GroupPut(
            lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=packed
        )


@asynccontextmanager
async def running(
    store: Store, folder: Path, kind: str = "RolloutDataSourceWithBuffer", **config: Any
) -> AsyncIterator[ReusingRun]:
    rows = "".join(json.dumps({"prompt": f"q{i}", "label": f"a{i}"}) + "\n" for i in range(8))
    (folder / "rows.jsonl").write_text(rows)
    data = {"prompt_data": [f"{folder}/rows.jsonl"], "label_key": "label"}
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "data": data})
    source = kind if "." in kind else f"{folder}/mine.py:{kind}"
    buffer = await BufferApplication.open(store, user_code=UserCode(hook_args(job), None, 60.0, folder))
    fields = {"max_staleness": 1, "expiry_action": ExpiryAction.REQUEUE, "data_source": source, **config}
    try:
        await buffer.create_stream(StreamConfig("train", 2, 2, **fields))
        step = buffer.ledger.stream("train").state.step
        epoch, _ = await buffer.rewind("train", step, f"rewind-{buffer.ledger.position}", 0)
        yield ReusingRun(buffer, epoch, step)
    finally:
        await buffer.close()
