"""What Tinker's service asks for, of the trainer's ranks and of the rollout service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.rollout import Rollout
from headrace.errors import DataLoss, FailedPrecondition, ResourceExhausted
from headrace.trajectory import Status, pack_column, unpack_column
from services.trainer.control.ranks import RankGroup
from services.trainer.tinker.slots import LoraSlots
from services.trainer.tinker.work import AdamParams, Completion, ForwardBackward, LoraSpec, Losses, Sample

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
