"""Watching and steering a training loop over gRPC, with ranks and ledger that only write down what they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.client.trainer import TrainerClient
from headrace.conformance.checks import results
from headrace.conformance.trainer import CHECKS, TrainerSubject
from headrace.errors import InvalidArgument, ResourceExhausted
from headrace.job.schema.job import Job
from headrace.rpc.client import call, connect
from headrace.rpc.server import RpcServer, Service
from services.trainer.control.build import TrainerBuild
from services.trainer.loop import train
from services.trainer.plan.batch import Batch
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from services.trainer.serving.servicer import TrainerServicer
from services.trainer.state import TrainState
from tests.unit.trainer.test_loop import Everything


class SavableEverything(Everything):
    """Also what requests ask of the ranks; a step is trained only when `go` lets it."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps=num_steps)
        self.go = asyncio.Semaphore(0)
        self.full_disk = False

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        await self.go.acquire()
        return {"reward/mean": step / 10}

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        self.diary.append(f"export_to {path}")
        if self.full_disk:
            raise ResourceExhausted("the disk is full")


@dataclass
class Desk:
    everything: SavableEverything
    client: TrainerClient
    stub: Any
    running: asyncio.Task[TrainState]
    folder: Path
    console: TrainerConsole
    address: str


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """With export_root."""
    everything, report = SavableEverything(num_steps=4), RunReport(tmp_path)
    report.resume(0)
    console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=4, groups_per_step=2)
    console.open(everything, 1)
    run = tmp_path / "run"
    job = {"model": {"hf_checkpoint": "m"}, "checkpoint": {"export_root": run, "save": run / "checkpoints"}}
    exports = TrainerBuild(Job.model_validate(job), tmp_path).exports()
    name = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name
    servicer = TrainerServicer(console, report, exports)
    service = Service(servicer, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)
    server = RpcServer("trainer", "127.0.0.1:0", [service])
    await server.start()
    running = asyncio.create_task(train(everything, everything, console, everything))
    running.add_done_callback(lambda _: console.finished())
    client, channel = TrainerClient(server.address), connect(server.address)
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
    yield Desk(everything, client, stub, running, tmp_path, console, server.address)
    running.cancel()
    await client.close()
    await channel.close(None)
    await server.stop(0)


def let(desk: Desk, steps: int) -> None:
    for _ in range(steps):
        desk.everything.go.release()


async def until(desk: Desk, phase: pb.Phase.ValueType, step: int) -> pb.GetStatusResponse:
    async with asyncio.timeout(60):
        while True:
            status = await desk.client.status()
            if (status.phase, status.step) == (phase, step):
                return status
            await asyncio.sleep(0.01)


async def test_progress_is_told_step_by_step_and_ends_with_the_run(desk: Desk) -> None:
    let(desk, 4)
    told = [(row.step, dict(row.metrics)["reward/mean"]) async for row in desk.client.watch_progress()]
    assert told == [(1, 0.0), (2, 0.1), (3, 0.2), (4, 0.3)]
    status = await desk.client.status()
    assert (status.phase, status.policy_version, status.epoch) == (pb.PHASE_FINISHED, 4, 7)
    rows = [json.loads(line) for line in (desk.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (desk.folder / "curves.png").stat().st_size > 1000


async def test_the_trainer_keeps_the_promises_of_its_proto(desk: Desk) -> None:
    let(desk, 2)
    async for row in desk.client.watch_progress():
        if row.step == 2:
            break
    async with connect(desk.address) as channel:
        assert [each async for each in results(CHECKS, TrainerSubject(channel)) if each.broken] == []


async def test_a_paused_run_holds_saves_on_request_and_goes_on(desk: Desk) -> None:
    await desk.client.pause()
    let(desk, 4)
    await until(desk, pb.PHASE_PAUSED, 1)
    saved = await desk.client.save_checkpoint()
    assert (saved.path, saved.step) == ("/checkpoints/1", 1)
    assert (await desk.client.status()).phase == pb.PHASE_PAUSED
    await desk.client.resume()
    assert (await desk.running).step == 4
    assert desk.everything.diary.count("save 1") == 1


async def test_a_stopped_run_ends_after_its_step_with_a_checkpoint(desk: Desk) -> None:
    await until(desk, pb.PHASE_WAITING, 0)
    await desk.client.stop()
    let(desk, 1)
    assert (await desk.running).step == 1
    assert desk.everything.diary[-3:] == ["save 1", "commit 7/1", "export"]


async def test_an_export_goes_to_a_new_folder_below_the_runs(desk: Desk) -> None:
    run = desk.folder / "run"
    (run / "full").mkdir(parents=True)
    (run / "full" / "file").touch()
    (run / "out").symlink_to("/var")
    for path, why in {
        "here": "'here' is not absolute",
        f"{run}/full": "is not empty: name a new folder",
        f"{run}/full/file/below": "full/file is not a folder",
        f"{run}/../elsewhere": "is not below .*run: name a folder there, or start the run with --export-root",
        f"{run}/out/model": "/var/model is not below",
        f"{run}/checkpoints/step-00000009": "which the run keeps for itself",
        f"{run}/{'a' * 300}": "cannot be read: .*File name too long",
    }.items():
        with pytest.raises(InvalidArgument, match=why):
            await desk.client.export_model(Path(path))
    await desk.client.pause()
    let(desk, 1)
    await until(desk, pb.PHASE_PAUSED, 1)
    reply = await desk.client.export_model(run / "new")
    assert f"export_to {run / 'new'}" in desk.everything.diary
    assert reply.path == str(run / "new")


async def test_an_export_is_done_once_for_its_path_while_it_is_there_and_a_failed_one_again(desk: Desk) -> None:
    await desk.client.pause()
    let(desk, 1)
    await until(desk, pb.PHASE_PAUSED, 1)
    folder = desk.folder / "run" / "model"
    desk.everything.full_disk = True
    with pytest.raises(ResourceExhausted, match="the disk is full"):
        await desk.client.export_model(folder)
    desk.everything.full_disk = False
    await desk.client.export_model(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    await desk.client.export_model(folder)
    assert desk.everything.diary.count(f"export_to {folder}") == 2
    (folder / "config.json").unlink()
    folder.rmdir()
    await desk.client.export_model(folder)
    assert desk.everything.diary.count(f"export_to {folder}") == 3


async def test_a_caller_that_gives_up_changes_nothing_and_gets_its_save_when_it_asks_again(desk: Desk) -> None:
    await until(desk, pb.PHASE_WAITING, 0)
    request = pb.SaveCheckpointRequest(request_id="mine")
    asking = asyncio.create_task(call(desk.stub.SaveCheckpoint, request, deadline_seconds=60))
    while not desk.console._requests._waiting:
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    let(desk, 4)
    assert (await desk.running).step == 4
    assert desk.everything.diary.count("save 1") == 1
    saved = await desk.client.save_checkpoint(request_id="mine")
    assert saved.path == "/checkpoints/1"
