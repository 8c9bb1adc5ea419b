"""`python -m services.rollout --config job.json --address host:port [--metrics-address host:port] --log-dir folder`.

The service needs transformers' tokenizers and no torch, which would be most of its start: users' functions, which may
need torch, run in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.errors import HeadraceError
from headrace.hooks.kit.sandbox import allow_insecure_sandbox
from headrace.job.schema.job import Job
from headrace.process.service_main import run_service
from headrace.rpc import tracing
from headrace.rpc.log import configure_logging
from headrace.rpc.net import Address, require_free
from headrace.rpc.server import RpcServer, Service, add_listen_arguments, listen_of
from headrace.rpc.tls import trust_authority
from headrace.run_folder import ROLLOUT, RunFolder, process_name
from services.rollout.build import job_for_replica, rollout_service
from services.rollout.engine.arguments import has_accelerator, listening_for_weights
from services.rollout.fleet_build import sglang_factory
from services.rollout.server import WAITING, RolloutServicer, WaitUntilStarted

DRAIN_SECONDS = 10.0
"""The time in which started responses may finish. Engines, router and leases end in what is left of the grace."""


def main() -> int:
    """0 after a signal; otherwise the code of `exit_status`, and one line that says why.

    Engines and router are its own, and it waits for its peers: none of its errors means that a peer is away.
    """
    arguments = _parser().parse_args()
    configure_logging("rollout")

    def body() -> None:
        job = job_for_replica(Job.model_validate_json(arguments.config.read_text()), arguments.number)
        configure_logging("rollout", run=job.run.run_name)
        process = "rollout" if arguments.number is None else process_name(ROLLOUT, arguments.number)
        tracing.start(process, RunFolder.of(job).traces, run=job.run.run_name, ratio=job.tracking.trace_sample_ratio)
        allow_insecure_sandbox(job.reward.insecure_sandbox)
        asyncio.run(_serve(job, arguments))

    return run_service("rollout", body)


async def _serve(job: Job, arguments: argparse.Namespace) -> None:
    listen = listen_of(vars(arguments))
    require_free(Address.parse(listen.address))
    if listen.tls and job.rollout.agent_function_path:
        trust_authority(listen.tls)  # agents meet the endpoint with TLS
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    on_gpus = await has_accelerator()
    if not on_gpus:  # NCCL leaves loopback out by itself
        os.environ.update(listening_for_weights(Address.parse(listen.address), os.environ))  # its engines inherit it
    factory = sglang_factory(job, arguments.log_dir, has_accelerator=on_gpus, service=arguments.number or 0)
    registry, samples = CollectorRegistry(), arguments.samples_dir
    service = rollout_service(
        job, factory, arguments.log_dir, registry, samples, arguments.number, has_accelerator=on_gpus, listen=listen
    )
    if arguments.listener is not None:
        service.adopt_listener(arguments.listener)
    servicer = WaitUntilStarted(RolloutServicer(service.parts), service.started)
    server = RpcServer(
        "rollout",
        listen.address,
        [Service(servicer, rollout_pb2_grpc.add_RolloutServiceServicer_to_server, name)],
        metrics_address=listen.metrics_address,
        insecure=listen.insecure,
        tls=listen.tls,
        tokens=listen.tokens,
        waiting=WAITING,
        drain_seconds=DRAIN_SECONDS,
    )
    server.metrics.registry.register(registry)
    await server.start(ready=False)
    try:
        await service.start()
    except HeadraceError:
        await server.stop(0.0)
        raise
    gc.freeze()  # libraries and tokenizer stay: a collection that looks at them holds the loop for a third of a second
    try:
        await server.set_ready()
        signalled = asyncio.create_task(server.run_until_signal(service.drain))
        lost = asyncio.create_task(service.lost())
        await asyncio.wait({signalled, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done():
            await lost
    finally:
        await service.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="services.rollout")
    parser.add_argument("--config", type=Path, required=True, help="the resolved job as JSON")
    add_listen_arguments(parser)
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="logs of engines and router")
    parser.add_argument("--number", type=int, help="which of several rollout services of the job this is, from 0")
    parser.add_argument("--listener", type=int, help="descriptor of the socket that listens at the job's openai_port")
    parser.add_argument("--samples-dir", type=Path, help="texts of samples that failed; absent: none are written")
    return parser


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then loads its tokenizers alone
    sys.exit(main())
