"""Watching and steering a training loop over gRPC, with ranks and ledger that only write down what they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.rpc.server import RpcServer, Service
from services.trainer.batch import Batch
from services.trainer.console import TrainerConsole
from services.trainer.loop import train
from services.trainer.report import Report
from services.trainer.servicer import TrainerServicer
from services.trainer.state import TrainState
from tests.unit.trainer.test_loop import Everything


class SteeredEverything(Everything):
    """Also what requests ask of the ranks; a step is trained only when `go` lets it."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps=num_steps)
        self.go = asyncio.Semaphore(0)

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        await self.go.acquire()
        return {"reward/mean": step / 10}

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        self.diary.append(f"export_to {path}")


@dataclass
class Desk:
    everything: SteeredEverything
    client: TrainerClient
    running: asyncio.Task[TrainState]
    folder: Path


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async def no_evaluation(state: TrainState) -> dict[str, float]:
        return {}

    everything = SteeredEverything(num_steps=4)
    report = Report(tmp_path)
    report.resume(0)
    console = TrainerConsole(report, no_evaluation, run="r", num_steps=4, groups_per_step=2)
    console.open(everything, 1)
    name = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name
    service = Service(TrainerServicer(console, report), trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)
    server = RpcServer("trainer", "127.0.0.1:0", [service])
    await server.start()
    running = asyncio.create_task(train(everything, everything, console, everything))
    running.add_done_callback(lambda _: console.finished())
    client = TrainerClient(server.address)
    yield Desk(everything, client, running, tmp_path)
    running.cancel()
    await client.close()
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


async def test_an_export_goes_to_a_new_absolute_folder(desk: Desk, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'here' is not absolute"):
        await desk.client.export_model(Path("here"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidArgument, match="is not empty: name a new folder"):
        await desk.client.export_model(tmp_path / "full")
    await desk.client.pause()
    let(desk, 1)
    await until(desk, pb.PHASE_PAUSED, 1)
    reply = await desk.client.export_model(tmp_path / "new")
    assert f"export_to {tmp_path / 'new'}" in desk.everything.diary
    assert reply.path == str(tmp_path / "new")


async def test_a_request_to_a_run_that_ends_is_told_so(desk: Desk) -> None:
    await until(desk, pb.PHASE_WAITING, 0)
    late = asyncio.create_task(desk.client.save_checkpoint())
    desk.running.cancel()
    with pytest.raises(FailedPrecondition, match="the run has ended"):
        await late


async def test_rows_after_the_checkpoint_are_let_go_when_a_run_resumes(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.resume(0)
    for step in (1, 2, 3):
        report.write(step, {"reward/mean": 0.5})
    again = Report(tmp_path)
    again.resume(2)
    assert [row.step for row in again.rows] == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
