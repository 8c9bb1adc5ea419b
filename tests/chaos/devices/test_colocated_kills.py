"""kill -9 of the trainer, the rollout service and the engine at each point at which a shared device changes hands.

Real launcher, buffer, Megatron rank, fleet, turns and publications. The engine is a process without a model that holds
memory of a fake device; the rank reports there what it has. The device refuses whoever comes while the other side has
memory. `make chaos` runs it (HEADRACE_COLOCATE_KILLS); in `make test` engines die in
`tests/unit/rollout/test_engine_memory.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.cli.main import main
from headrace.job.schema.run import PublishSection
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder
from tests.chaos.ranks.certain_run import MORTAL
from tests.support.devices.shared_device import SharedDevice
from tests.support.fakes.certain_rollout import allow, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

KILLS = os.environ.get("HEADRACE_COLOCATE_KILLS", "")
POINTS = (
    *(f"{event} 0" for event in ("devices_taken", "weights_written", "memory_released", "devices_given", "published")),
    *("memory_taken 0", "devices_cleared 0", "built 0"),
    *(f"{event} rollout" for event in ("memory_release_begins", "engine_memory_released", "memory_resume_begins")),
    *(f"{event} rollout" for event in ("engine_memory_resumed", "engine_starting", "publication_begun", "published")),
    *(f"{event} rollout engines" for event in ("memory_release_begins", "engine_memory_released")),
    *(f"{event} rollout engines" for event in ("memory_resume_begins", "engine_memory_resumed", "publication_begun")),
)
"""A line of a log, the process that says it, and who dies of it unless it is that process."""
AT_A_START = ("devices_cleared 0", "built 0", "engine_starting rollout")
GROUPS_PER_STEP = 4


@pytest.mark.skipif(not KILLS, reason="long: make chaos sets HEADRACE_COLOCATE_KILLS")
@pytest.mark.ranks
@pytest.mark.timeout(7200)
async def test_either_side_may_die_wherever_the_device_changes_hands_and_nothing_is_lost(tmp_path: Path) -> None:
    points = POINTS if KILLS == "all" else KILLS.split(",")
    num_steps = 2 * len(points) + 2
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    async with running(tmp_path / "calm", checkpoint, num_steps) as (calm, _, _):
        await calm.finished()
    supply = asyncio.Semaphore(GROUPS_PER_STEP)
    async with running(tmp_path / "killed", checkpoint, num_steps, supply) as (killed, device, order):
        for number, point in enumerate(points):
            await killed.until_step(2 * number + 1)
            if point in AT_A_START:  # who says it starts again first
                order.write_text("devices_taken 0" if point.endswith(" 0") else "publication_begun rollout")
                allow(supply, GROUPS_PER_STEP)
                await carried_out(order, killed)
            order.write_text(point)
            allow(supply, 2 * GROUPS_PER_STEP)
            await carried_out(order, killed)
        allow(supply, num_steps * GROUPS_PER_STEP)
        await killed.finished()
    assert [event for event in device.events if event.startswith("REFUSED")] == []
    assert killed.trained() == calm.trained()
    weights, expected = ((load_file(run.export / "model.safetensors")) for run in (killed, calm))
    assert [name for name in expected if not weights[name].equal(expected[name])] == []
    assert await asyncio.to_thread(main, ["audit", str(killed.folder.path)]) == 0


async def carried_out(order: Path, run: TrainingRun) -> None:
    """Waits until somebody has died of it."""
    while order.exists():
        assert run.is_running, run.last_words()
        await asyncio.sleep(0.02)  # another party's state


@asynccontextmanager
async def running(
    folder: Path, checkpoint: Path, num_steps: int, supply: asyncio.Semaphore | None = None
) -> AsyncIterator[tuple[TrainingRun, SharedDevice, Path]]:
    """A colocated run that restarts its trainer, beside a rollout service that is started again when it ends."""
    folder.mkdir()
    device, order, address = SharedDevice(folder / "device"), folder / "order", f"127.0.0.1:{free_port()}"
    mortal = MORTAL | {"MORTAL_ORDER": str(order), "SHARED_DEVICE": str(device.folder)}
    run = TrainingRun(
        folder, checkpoint,
        "--colocate", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--rollout-address", address, "--reward-address", "127.0.0.1:9",
        "--num-rollout", str(num_steps), "--save-interval", "1", "--lr", "1e-3", "--save-hf", str(folder / "export"),
        "--update-weight-probe-tolerance", "1e6",  # the engine has no model to compare with
        "--use-fault-tolerance",
        environment=mortal,
        constants=["headrace.launch.specs:MAX_TRAINER_RESTARTS=100"],
    )  # fmt: skip
    weights = RunFolder(run.folder.path).weights_of(PublishSection(update_weight_transport="ipc"))
    words = [address, str(device.folder), str(weights), str(folder)]
    serving = asyncio.create_task(_served(words, mortal, folder / "rollout.log"))
    try:
        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer"), supply))
            try:
                yield run, device, order
            finally:
                producing.cancel()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _served(words: list[str], mortal: dict[str, str], log: Path) -> None:
    """Starts the service, again and again."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    while True:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.support.devices.colocated_rollout",
                *words,
                cwd=ROOT,
                env=environment | mortal | {"RANK": "rollout"},
                stdout=output,
                stderr=output,
            )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
