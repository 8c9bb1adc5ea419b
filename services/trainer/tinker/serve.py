"""One rank of a trainer that serves Tinker's clients; rank 0 has the HTTP server."""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.client.rollout import Rollout
from headrace.errors import ConfigError, DataLoss, FailedPrecondition, ResourceExhausted
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit
from headrace.models.registry import read_architecture
from headrace.rpc.access import Access
from headrace.rpc.http_server import EndpointServer, Gate
from headrace.rpc.log import log
from headrace.rpc.server import Listen
from headrace.run_folder import RunFolder
from headrace.trajectory import Status, pack_column, unpack_column
from services.trainer.control.ranks import JoinedRanks, RankGroup, follow
from services.trainer.tinker.slots import LoraSlots
from services.trainer.tinker.work import AdamParams, Completion, ForwardBackward, LoraSpec, Losses, Sample

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


P = ParamSpec("P")
R = TypeVar("R")


class TinkerRanks:
    """All ranks as one. A command that takes longer than `seconds` has lost a rank."""

    def __init__(self, group: RankGroup[LoraSlots], *, seconds: float) -> None:
        self._group = group
        self._seconds = seconds

    async def create(self, model_id: str, spec: LoraSpec) -> None:
        await self._all(LoraSlots.create, model_id, spec)

    async def load(self, model_id: str, spec: LoraSpec, file: Path, *, optimizer: bool) -> None:
        for refusal in await self._all(LoraSlots.refusal, str(file)):
            raise DataLoss(refusal)
        await self._all(LoraSlots.load, model_id, spec, str(file), optimizer)

    async def drop(self, model_id: str) -> None:
        await self._all(LoraSlots.drop, model_id)

    async def compute(self, model_id: str, work: ForwardBackward) -> Losses:
        parts = await self._all(LoraSlots.compute, model_id, work.data, work.loss_fn, work.settings, work.backward)
        log_probs = {number: row for part in parts for number, row in part.log_probs.items()}
        return Losses([log_probs[number] for number in range(len(work.data))], sum(part.loss for part in parts))

    async def step(self, model_id: str, params: AdamParams) -> float:
        norm = (await self._all(LoraSlots.step, model_id, params))[0]
        if not np.isfinite(norm):
            raise FailedPrecondition(
                f"the gradient's norm is {norm}: the step was left out, and its gradients are dropped. Lower the "
                "learning rate, or look for log-probs that are far apart"
            )
        return norm

    async def save(self, model_id: str, file: Path) -> None:
        for refusal in await self._all(LoraSlots.save, model_id, str(file)):
            raise ResourceExhausted(refusal)

    async def save_adapter(self, model_id: str, folder: Path) -> None:
        for refusal in await self._all(LoraSlots.save_adapter, model_id, str(folder)):
            raise ResourceExhausted(refusal)

    def _all(
        self,
        method: Callable[Concatenate[LoraSlots, P], R | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Awaitable[list[R]]:
        return self._group.gather(self._seconds, method, *args, **kwargs)


class TinkerEngines:
    def __init__(self, rollout: Rollout, *, seconds: float) -> None:
        self._rollout = rollout
        self._seconds = seconds

    async def sample(self, adapter: Path | None, work: Sample) -> tuple[Sequence[Completion], Sequence[float] | None]:
        request = rollout_pb2.GenerateRequest(
            tokens=pack_column("tokens", np.asarray(work.prompt, dtype=np.int32)),
            sampling=work.sampling,
            return_tokens=True,
            n=work.num_samples,
            adapter_path="" if adapter is None else str(adapter),
            prompt_log_probs=work.prompt_log_probs,
        )
        tokens: defaultdict[int, list[int]] = defaultdict(list)
        log_probs: defaultdict[int, list[float]] = defaultdict(list)
        stopped: dict[int, bool] = {}
        prompt: list[float] | None = [] if work.prompt_log_probs else None
        async for reply in self._rollout.generate(request, deadline_seconds=self._seconds):
            tokens[reply.index] += unpack_column(reply.tokens).tolist()
            log_probs[reply.index] += unpack_column(reply.log_probs).tolist()
            if reply.status:
                stopped[reply.index] = reply.status == Status.COMPLETED.number
            if reply.HasField("prompt_log_probs"):
                prompt = unpack_column(reply.prompt_log_probs).tolist()
        return [Completion(tokens[i], log_probs[i], stopped[i]) for i in range(work.num_samples)], prompt
