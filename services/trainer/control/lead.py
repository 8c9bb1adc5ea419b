"""Rank 0's own work: it serves gRPC at once, runs the training loop, and ends the run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.errors import NothingToLearn
from headrace.process.rank_signals import ENDING
from headrace.rpc.listen import Listen
from headrace.rpc.server import RpcServer, Service
from services.trainer import loop as training
from services.trainer.control.build import TrainerBuild
from services.trainer.control.rank import meet
from services.trainer.control.rank_group import RankGroup
from services.trainer.data.buffer_port import TrainerBuffer
from services.trainer.data.fetch import Fetch
from services.trainer.ledger import StreamLedger
from services.trainer.megatron.parallel import FILES_TIMEOUT
from services.trainer.serving.requests import Steered
from services.trainer.serving.servicer import TrainerServicer


async def lead(
    build: TrainerBuild, listen: Listen, buffer: TrainerBuffer, fetch: Fetch, compute: ThreadPoolExecutor
) -> None:
    """Returns when the run is finished or left; raises what ended it otherwise."""
    rollout = build.rollout()
    schedule, report = build.schedule(), build.report()
    console = build.console(report, rollout, schedule)
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, console.leave)
    server = _server(listen, TrainerServicer(console, report, build.exports()))
    await server.start(ready=False)

    async def run(ranks: training.Ranks, steered: Steered, world_size: int, step: int) -> None:
        report.resume(step)
        console.open(steered, world_size, step)
        await server.set_ready()
        recorder = build.recorder(buffer, fetch.stream)
        ledger = StreamLedger(buffer, fetch.stream, console, build.breaker(), recorder)
        await training.train(ledger, ranks, console, schedule)

    async def train() -> None:
        built = await asyncio.get_running_loop().run_in_executor(compute, build.rank, fetch, met)
        group = RankGroup(met.channel, built.worker.execute, compute)
        ranks = build.ranks(group, built, rollout, console)
        await run(ranks, ranks, built.layout.world_size, built.restored_step)
        await group.leave(deadline_seconds=FILES_TIMEOUT.total_seconds())

    try:
        if build.trains:
            await build.clear_devices(rollout)
            met = await meet(build.join, compute)
            await met.channel.guard(train())
            await met.channel.close()
        else:
            ranks = build.untrained((await buffer.stats(fetch.stream)).committed_step)
            await run(ranks, ranks, 0, await ranks.restore())
        if console.verdict:
            raise NothingToLearn(console.verdict)
        console.finished()
    except BaseException as error:
        console.finished(str(error) or type(error).__name__)
        raise
    finally:
        await server.stop()
        if rollout is not None:
            await rollout.close()
        await asyncio.to_thread(build.clear_memory)


def _server(listen: Listen, desk: TrainerServicer) -> RpcServer:
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    return RpcServer(
        "trainer",
        listen.address,
        [Service(desk, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)],
        metrics_address=listen.metrics_address,
        insecure=listen.insecure,
        tls=listen.tls,
        tokens=listen.tokens,
    )
