"""`python -m services.buffer` runs the ledger as a process. It has the job's `train` stream from the start."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import DataLoss, Unavailable
from headrace.job.schema.job import Job, read_job
from headrace.process.service_main import run_service
from headrace.rpc import tracing
from headrace.rpc.log import configure_logging, log
from headrace.rpc.server import RpcServer, Service, add_listen_arguments, listen_of
from headrace.run_folder import BUFFER, RunFolder, process_name
from services.buffer.build import of_shard, store_of_job, train_stream, user_code_of
from services.buffer.ledger.group import GroupState
from services.buffer.ledger.ledger import Ledger
from services.buffer.prompts.files import PromptFiles
from services.buffer.runtime.application import BufferApplication
from services.buffer.servicer import REQUEST_BYTES, WAITING, BufferServicer
from services.buffer.store.base import Store
from services.buffer.wire import add_to_server

# After a disk failed: long enough for UNAVAILABLE to reach those who wait.
_FAILED_GRACE_SECONDS = 0.5
_DATABASES_ERRORS = (Unavailable,)
MIN_FREE_DISK_BYTES = 256 << 20
"""Puts are refused while the ledger's disk has less space left."""


def main(open_store: Callable[[Job, Path], Store] = store_of_job) -> int:
    """Returns 0 after a signal; otherwise one of `exit_status`, with one line that says why."""
    arguments = _parser().parse_args()
    configure_logging("buffer")
    keep_large_blocks()

    def body() -> None:
        job = read_job(arguments.config)
        if arguments.shard is not None:
            job = of_shard(job, arguments.shard)
        configure_logging("buffer", run=job.run.run_name)
        process = "buffer" if arguments.shard is None else process_name(BUFFER, arguments.shard)
        tracing.start(process, RunFolder.of(job).traces, run=job.run.run_name, ratio=job.tracking.trace_sample_ratio)
        with long_lived():
            store = open_store(job, arguments.data_dir)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(job, arguments, store))

    return run_service("buffer", body, peers_errors=_DATABASES_ERRORS)


async def serve(job: Job, arguments: argparse.Namespace, store: Store) -> None:
    """Serves until a signal. Raises the error with which the store failed."""
    with long_lived():
        buffer = await BufferApplication.open(
            store,
            columns_folder=arguments.data_dir / "columns",
            user_code=user_code_of(job, arguments.data_dir),
            prompt_files=PromptFiles(job.buffer.prompt_root, [file.path for file in train_stream(job).files]),
            max_column_bytes=job.buffer.max_payload_bytes,
            min_free_disk_bytes=MIN_FREE_DISK_BYTES,
            retain_events=job.buffer.retain_events,
        )
    try:
        await _serve(job, arguments, buffer)
    finally:
        if not buffer.journal.failed.done():
            await buffer.close()


async def _serve(job: Job, arguments: argparse.Namespace, buffer: BufferApplication) -> None:
    wanted = train_stream(job)
    try:
        await buffer.set_limits(wanted)
        config, created = await buffer.create_stream(wanted)
        log.info("stream_open", stream=config.name, created=created, position=buffer.ledger.position)
    except DataLoss as error:  # its own row is damaged: other streams are served, and its callers are told why
        log.error("stream_damaged", stream=wanted.name, message=error.message)
    listen = listen_of(vars(arguments))
    service = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name
    server = RpcServer(
        "buffer",
        listen.address,
        [Service(BufferServicer(buffer), add_to_server, service)],
        metrics_address=listen.metrics_address,
        insecure=listen.insecure,
        tls=listen.tls,
        tokens=listen.tokens,
        request_bytes=REQUEST_BYTES,
        gate=buffer.pulse.require_store,
        waiting=WAITING,
    )
    server.metrics.registry.register(LedgerCollector(buffer.ledger))
    await server.start()
    buffer.pulse.listeners.append(server.set_serving)
    signalled = asyncio.create_task(server.run_until_signal())
    await asyncio.wait({signalled, buffer.journal.failed}, return_when=asyncio.FIRST_COMPLETED)
    if buffer.journal.failed.done():
        # gRPC's threads must not outlive the interpreter they call into.
        await server.stop(_FAILED_GRACE_SECONDS)
        buffer.journal.failed.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m services.buffer", description="The sample ledger.")
    parser.add_argument("--config", type=Path, required=True, help="the resolved job, as JSON")
    add_listen_arguments(parser)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the ledger")
    parser.add_argument("--shard", type=int, help="which of the job's buffer_shards this is, from 0")
    return parser


# How the process keeps its memory: large requests come and go, and a ledger's rows stay.

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_large_blocks() -> None:
    """Tells glibc to keep the memory of large requests instead of mapping new pages each time.

    Call it once, at the start of a process. It does nothing where the C library is not glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextmanager
def long_lived() -> Iterator[None]:
    """Switches the cyclic collector off inside, and exempts all that exists at the end from it for good.

    Loading makes a million objects that stay: the collector would walk them again and again while they are made, and
    later stop the server at every full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class LedgerCollector(Collector):
    """Register it once with the server's registry."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterable[Metric]:
        groups = GaugeMetricFamily("headrace_buffer_groups", "Groups in a state.", labels=["stream", "state"])
        numbers = {
            "payload_bytes": _gauge("payload_bytes", "Payload bytes stored."),
            "step": _gauge("step", "The step to be consumed next."),
            "committed_step": _gauge("committed_step", "Every step below it is committed."),
            "policy_version": _gauge("policy_version", "The policy version that engines serve."),
            "prompts_read": _gauge("prompts_read", "Prompts read from the prompt files."),
            "bad_lines": _gauge("bad_lines", "Bad lines of the prompt files that were skipped."),
        }
        for name, stream in list(self._ledger.streams.items()):
            state = stream.state
            for group_state in GroupState:
                groups.add_metric([name, group_state.name], stream.count(group_state))
            numbers["payload_bytes"].add_metric([name], stream.payload_bytes)
            numbers["step"].add_metric([name], state.step)
            numbers["committed_step"].add_metric([name], state.committed_step)
            numbers["policy_version"].add_metric([name], state.policy_version)
            numbers["prompts_read"].add_metric([name], state.prompts_read)
            numbers["bad_lines"].add_metric([name], state.num_bad_lines)
        return [groups, *numbers.values()]


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_buffer_{name}", text, labels=["stream"])


if __name__ == "__main__":
    sys.exit(main())
