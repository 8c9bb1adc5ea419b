"""The trainer's console, report, servicer and loop as a process, over ranks that only write down what they do."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.rpc.log import configure_logging
from headrace.rpc.server import RpcServer, Service
from services.trainer.loop import train
from services.trainer.plan.batch import Batch
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from services.trainer.serving.servicer import ExportFolders, TrainerServicer
from services.trainer.state import TrainState
from tests.unit.trainer.test_loop import Everything

NUM_STEPS = 1_000_000
STEP_SECONDS = 0.02
_MOST_KEPT = 1000


class SlowRanks(Everything):
    """A step takes a moment; saves and exports do nothing but wait."""

    step_seconds = STEP_SECONDS

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(self.step_seconds)
        del self.diary[:-_MOST_KEPT]
        return {"reward/mean": 0.5}

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        return Batch((), f"digest {step}".encode())

    @property
    def stopping(self) -> bool:
        return False

    def take_safe(self) -> TrainState | None:
        return self.taken.pop() if self.taken else None

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        await asyncio.sleep(STEP_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--address", "--metrics-address", "--folder"):
        parser.add_argument(name, required=True)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    configure_logging("trainer")
    asyncio.run(_serve(parser.parse_args()))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    ranks = SlowRanks(num_steps=NUM_STEPS)
    ranks.step_seconds = arguments.step_seconds
    report = RunReport(Path(arguments.folder) / "report")
    report.resume(0)
    console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=NUM_STEPS, groups_per_step=2)
    console.open(ranks, 1)
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    servicer = TrainerServicer(console, report, ExportFolders(Path(arguments.folder), []))
    server = RpcServer(
        "trainer",
        arguments.address,
        [Service(servicer, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)],
        metrics_address=arguments.metrics_address,
    )
    await server.start()
    running = asyncio.create_task(train(ranks, ranks, console, ranks))
    running.add_done_callback(lambda _: console.finished())
    signalled = asyncio.create_task(server.run_until_signal())
    await asyncio.wait({running, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # a loop that ended by a client's fault ends the process, as it does the real one
        await signalled


if __name__ == "__main__":
    sys.exit(main())
