"""The rollout service as a process, router and production included, on engines without a model."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from collections import deque
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.job.schema.services import ServicesSection
from headrace.rpc.log import configure_logging
from headrace.rpc.server import RpcServer, Service
from services.rollout.build import rollout_service
from services.rollout.server import RolloutServicer
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.tiny_model import make_tiny_qwen3

NUM_ENGINES = 2
TOKEN_SECONDS = 0.002


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--address", "--metrics-address", "--folder", "--buffer", "--reward"):
        parser.add_argument(name, required=True)
    configure_logging("rollout")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the fake engines', whom the router asks for HTTP/2
    asyncio.run(_serve(parser.parse_args()))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    make_tiny_qwen3(folder / "tokenizer")
    job = Job(
        model=ModelSection(hf_checkpoint=folder / "tokenizer"),
        data=DataSection(prompt_data=(str(folder / "prompts.jsonl"),)),
        rollout=RolloutSection(
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            rollout_max_response_len=4,
            generate_timeout_seconds=5.0,
        ),
        services=ServicesSection(buffer_address=arguments.buffer, reward_address=arguments.reward),
        eval=EvalSection(eval_prompt_data=(("e", folder / "prompts.jsonl"),)),
        placement=PlacementSection(rollout_num_gpus=NUM_ENGINES, rollout_max_engines=NUM_ENGINES + 1),
    )
    registry = CollectorRegistry()
    service = rollout_service(job, lambda number: _engine(), folder, registry)
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    parts = RolloutServicer(service.parts)
    server = RpcServer(
        "rollout",
        arguments.address,
        [Service(parts, rollout_pb2_grpc.add_RolloutServiceServicer_to_server, name)],
        metrics_address=arguments.metrics_address,
    )
    await service.start()
    gc.freeze()  # as the service itself
    try:
        await server.start()
        await server.run_until_signal()
    finally:
        await service.stop()


def _engine() -> FakeEngine:
    """It forgets what it was asked: the memory of this process is looked at."""
    engine = FakeEngine(WIRE, token_seconds=TOKEN_SECONDS)
    engine.calls, engine.bodies = deque(maxlen=1), deque(maxlen=1)
    return engine


if __name__ == "__main__":
    sys.exit(main())
