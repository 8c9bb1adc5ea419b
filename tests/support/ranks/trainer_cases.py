"""What a spawned rank does in the tests of whole trainers: it is one, of one job after the other.

In each case's folder is what a run leaves there, and the exported model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from headrace.api.buffer.v1 import buffer_pb2
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.job.schema.run import PublishSection
from headrace.run_folder import RunFolder
from services.buffer.store.base import Store
from services.rollout.engine.process import EngineFactory
from tests.support.devices.shared_device import SharedDevice, watch
from tests.support.devices.weights_engine import WeightsEngine
from tests.support.fakes.certain_rollout import CertainRollout, Change, certain_rollout, produce
from tests.support.fakes.policy_engine import PolicyEngine
from tests.support.ranks.ranks import RankCase, Sections, laid_over

NUM_STEPS = 2
LOG_PROB_BOUND = 1e-4
"""By which trainer and engine may differ on the probe, in the mean."""
_SIZES = {"rollout_batch_size": 4, "n_samples_per_prompt": 4}


@dataclass(frozen=True)
class TrainerCase(RankCase):
    """A whole trainer; `services` are the addresses of its buffer and its rollout services."""

    services: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[str] = ()
    """The folders of the fake devices that its ranks share with engines, one a machine; none: they have their own.

    Of several machines each has one rank.
    """
    plain: ClassVar[Sections] = {
        "rollout": {"num_rollout": NUM_STEPS, "rollout_temperature": 0.8, **_SIZES},
        "train": {"micro_batch_size": 3, "num_steps_per_rollout": 1},
        "megatron": {"lr": 1e-2, "adam_eps": 1e-3},
        "publish": {"update_weight_probe_tolerance": LOG_PROB_BOUND, "update_weight_buffer_size": 100_000},
    }

    def job(self) -> Job:
        """It exports to its folder."""
        own: Sections = {
            "model": {"hf_checkpoint": self.hf_checkpoint},
            "checkpoint": {"save_hf": str(self.out / "export")},
            "services": self.services,
        }
        return laid_over(self.plain, own, self.sections)

    def run(self) -> None:
        from headrace.rpc.server import Listen
        from services.trainer.__main__ import run_rank
        from services.trainer.control.build import TrainerBuild

        rank = int(os.environ["RANK"])
        device = Path(self.devices[rank % len(self.devices)]) if self.devices else None
        with watch(device, rank) if device else nullcontext():
            asyncio.run(run_rank(TrainerBuild(self.job(), Path(self.out)), Listen("127.0.0.1:0")))


@asynccontextmanager
async def served(
    name: str,
    folder: Path,
    checkpoint: Path,
    sections: Sections,
    change: Change = lambda put: put,
    store: Store | None = None,
    devices: Sequence[SharedDevice] = (),
) -> AsyncIterator[tuple[TrainerCase, Sequence[CertainRollout]]]:
    """The case, with a buffer and a rollout service for it in this process; they make (and change) its samples.

    With several `devices` there is a rollout service for each.
    """
    from services.buffer.store.memory import MemoryStore
    from tests.support.ledgers.buffer_samples import text_prompts
    from tests.support.processes.buffer_server import served_buffer

    weights_root = RunFolder(folder / name).weights_of(PublishSection(**sections.get("publish", {})))
    config = buffer_pb2.StreamConfig(
        name="train", n_samples_per_prompt=_SIZES["n_samples_per_prompt"], groups_per_step=_SIZES["rollout_batch_size"]
    )
    builds: Sequence[EngineFactory] = [partial(WeightsEngine, device=each) for each in devices]
    async with (
        AsyncExitStack() as stack,
        served_buffer(store or MemoryStore()) as (_, server),
        BufferClient(server.address) as client,
    ):
        rollouts = [
            await stack.enter_async_context(
                certain_rollout(build, weights_root=weights_root, shares_devices=bool(devices))
            )
            for build in builds or [lambda _: PolicyEngine(checkpoint)]
        ]
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(20))))
        producing = asyncio.create_task(produce(server.address, change=change))
        addresses = ",".join(rollout.address for rollout in rollouts)
        services = {"buffer_address": server.address, "rollout_address": addresses}
        try:
            folders = [str(device.folder) for device in devices]
            yield TrainerCase(name, str(folder), str(checkpoint), sections, None, services, folders), rollouts
        finally:
            producing.cancel()
