"""One rank of a trainer that serves Tinker's clients; rank 0 has the HTTP server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.api.trainer.v1 import trainer_pb2
from headrace.client.rollout import Rollout
from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit
from headrace.models.registry import read_architecture
from headrace.rpc.access import Access
from headrace.rpc.http_server import EndpointServer, Gate
from headrace.rpc.log import log
from headrace.rpc.server import Listen
from headrace.run_folder import RunFolder
from services.trainer.control.ranks import JoinedRanks, RankGroup, follow
from services.trainer.tinker.slots import LoraSlots

_COMMAND_SECONDS = 3600.0
"""A request's data may be as large as a client likes."""


async def build_slots(job: Job, joined: JoinedRanks, compute: ThreadPoolExecutor) -> LoraSlots:
    """Loads the base, in the compute thread of every rank at once."""

    def build() -> LoraSlots:
        slots = LoraSlots(job, joined.layout)
        gc.freeze()
        return slots

    return await asyncio.get_running_loop().run_in_executor(compute, build)


async def follow_tinker(job: Job, joined: JoinedRanks, compute: ThreadPoolExecutor) -> None:
    await follow(joined.channel, await build_slots(job, joined, compute), compute, LoraSlots)


async def serve_tinker(
    job: Job,
    run_dir: Path,
    listen: Listen,
    rollout: Rollout,
    joined: JoinedRanks,
    compute: ThreadPoolExecutor,
    until_ended: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Rank 0: serves until `until_ended` returns. What is not answered by then is carried out after the next start.

    Raises ConfigError where the package `tinker` is missing, or others can reach the address.
    """
    try:
        from services.trainer.tinker.http import TinkerHttp
        from services.trainer.tinker.wire import TinkerWire
    except ImportError as error:
        raise ConfigError(f"Tinker's API needs its package: pip install 'headrace[tinker]' ({error})") from error
    from services.trainer.tinker.backends import TinkerEngines, TinkerRanks
    from services.trainer.tinker.checkpoints import Checkpoints
    from services.trainer.tinker.journal import Journal
    from services.trainer.tinker.service import Tinker

    await rollout.pause_production()
    architecture = read_architecture(job.model.hf_checkpoint)
    slots = await build_slots(job, joined, compute)
    group = RankGroup(joined.channel, slots, compute, LoraSlots)
    root = RunFolder(run_dir).weights_of(job.publish) / "tinker"
    max_tokens = ContextLimit.of(job.rollout, job.sglang, architecture, job.placement.engine_groups).tokens
    rank = job.lora.lora_rank
    assert rank is not None, "the job's rules ask for it"
    wire = TinkerWire(vocab_size=architecture.vocab_size, max_rank=rank, max_tokens=max_tokens)
    tinker = Tinker(
        TinkerRanks(group, seconds=_COMMAND_SECONDS),
        TinkerEngines(rollout, seconds=job.rollout.generate_timeout_seconds),
        wire,
        Journal(root / "requests.sqlite"),
        Checkpoints(root),
        max_models=job.tinker.tinker_models,
    )
    service = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    gate = Gate(service, Access(has_certificates=listen.tls is not None, tokens=listen.tokens))
    folder = job.model.hf_checkpoint
    http = TinkerHttp(tinker, wire, gate, names_of(job), folder, max_tokens)
    server = endpoint_of(job, listen, http.application())
    tinker.start()
    try:
        await server.start()
        log.info("tinker_api", url=server.url, models=names_of(job))
        ended, broken = asyncio.create_task(until_ended()), asyncio.create_task(tinker.broken())
        await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if broken.done():
            broken.result()
        broken.cancel()
    finally:
        tinker.let_go()
        await server.stop()
        await tinker.stop()
    await group.gather(_COMMAND_SECONDS, LoraSlots.leave)


def endpoint_of(job: Job, listen: Listen, application: Any) -> EndpointServer:
    """The API's server. Raises ConfigError where others can reach it, unencrypted."""
    server = EndpointServer(
        application,
        job.tinker.tinker_port,
        host=job.tinker.tinker_host,
        tls=listen.tls,
        section="tinker",
        flag="tinker",
    )
    server.require_private(insecure=listen.insecure, has_tokens=listen.tokens is not None)
    return server


def names_of(job: Job) -> list[str]:
    given: Sequence[str | None] = (
        job.tinker.tinker_model_name,
        job.model.hf_checkpoint.name,
        str(job.model.hf_checkpoint),
    )
    return list(dict.fromkeys(name for name in given if name))
