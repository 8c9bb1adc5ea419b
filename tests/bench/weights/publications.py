"""Publications as the trainer's publisher runs them, by each transport; the bench of publications times them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import cast

from headrace.job.schema.job import Job
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.control.senders import WeightSender, WeightWriter
from services.trainer.control.transport import sweep
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import MemoryFiles
from tests.support.fakes.same_weights import ALONE, SameWeights


class Publications:
    """Whole transactions, checksums included, as the trainer's publisher runs them."""

    def __init__(self, receiver: Receiver, policy: SameWeights) -> None:
        self._receiver = receiver
        self._sender = WeightSender(
            cast(Policy, policy), ALONE, lambda _: False,
            host="127.0.0.1", bucket_bytes=Job.model_fields["publish"].get_default(call_default_factory=True)
            .update_weight_buffer_size, timeout_seconds=600.0,
        )  # fmt: skip
        described = self._sender.describe()
        assert described is not None
        self.buckets = described.buckets
        self._version = 0

    async def seconds(self, version: int) -> tuple[float, float]:
        """The whole, and its standstill."""
        self._version = version
        started = time.perf_counter()
        group = self._sender.open(0)
        assert group is not None
        plan = Plan(
            publication_id=f"bench-{self._version}",
            policy_version=self._version,
            buckets=dict(enumerate(self.buckets)),
            groups=(GroupPlan(group.name, group.host, group.port, tuple(range(len(self.buckets))), group.joined),),
            backend="gloo",
            pause_mode="in_place",
            deadline_seconds=600.0,
            epoch=1,
        )
        begun = await self._receiver.begin(plan)
        sending = asyncio.create_task(asyncio.to_thread(self._sender.send, plan.publication_id, {0: begun.world_size}))
        for number in range(len(self.buckets)):
            await self._receiver.receive(plan.publication_id, number)
        sent = await sending
        assert sent is not None
        assert sent.error is None, sent.error
        committed = await self._receiver.commit(plan.publication_id, sent.checksums)
        return time.perf_counter() - started, committed.paused_seconds

    def close(self) -> None:
        self._sender.drop([0])


class FilePublications:
    """The same through files: written, loaded, verified; the version before is deleted after that.

    With `in_memory` they lie in shared memory, else they are synced to the disk.
    """

    def __init__(self, receiver: Receiver, policy: SameWeights, root: Path, *, in_memory: bool) -> None:
        self._receiver = receiver
        self._specs = policy.hf_tensor_specs()
        self._root = root
        self._in_memory = in_memory
        self._writer = WeightWriter(
            cast(Policy, policy),
            ALONE,
            lambda _: False,
            root=root,
            file_bytes=512 << 20,
            memory=MemoryFiles() if in_memory else None,
        )

    async def seconds(self, version: int) -> tuple[float, float, int]:
        """The whole, its standstill, and the bytes in the folder."""
        started, name = time.perf_counter(), f"e1-v{version}-0a1b2c3d"
        sent = await asyncio.to_thread(self._writer.send, name, {})
        assert sent is not None
        assert sent.error is None, sent.error
        plan = Plan(
            publication_id=name,
            policy_version=version,
            buckets={0: self._specs},
            groups=(),
            backend="gloo",
            pause_mode="in_place",
            deadline_seconds=600.0,
            epoch=1,
            folder=self._root / name,
        )
        await self._receiver.begin(plan)
        await self._receiver.receive(name, 0)
        if self._in_memory:
            sent = await asyncio.to_thread(self._writer.send, name, {}, kept=True)
            assert sent is not None
        committed = await self._receiver.commit(name, sent.checksums)
        seconds = time.perf_counter() - started
        num_bytes = sum(file.stat().st_size for file in (self._root / name).iterdir())
        sweep(self._root, set(), 1)
        return seconds, committed.paused_seconds, num_bytes
