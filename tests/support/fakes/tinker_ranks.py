"""Ranks and engines for Tinker's service that compute nothing: what they answer says what they were asked.

The real ranks are under tests/unit/trainer/tinker/test_slots.py, both real ones under tests/e2e/test_tinker.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.errors import FailedPrecondition
from services.trainer.tinker.work import AdamParams, Completion, ForwardBackward, LoraSpec, Losses, Sample


class CountingRanks:
    """A model is the sum of the losses since it was made, and the number of its steps."""

    def __init__(self) -> None:
        self.models: dict[str, list[float]] = {}
        self.calls: list[str] = []
        self.held = asyncio.Event()
        self.held.set()
        """Clear it: requests wait before they are carried out."""
        self._is_busy = False

    async def _one(self, what: str) -> None:
        assert not self._is_busy, "two requests at once"
        self._is_busy = True
        try:
            await self.held.wait()
            await asyncio.sleep(0)
            self.calls.append(what)
        finally:
            self._is_busy = False

    async def create(self, model_id: str, spec: LoraSpec) -> None:
        await self._one(f"create {spec.rank}")
        self.models[model_id] = [0.0, 0.0]

    async def load(self, model_id: str, spec: LoraSpec, file: Path, *, optimizer: bool) -> None:
        await self._one(f"load {optimizer}")
        total, steps = json.loads(file.read_text())
        self.models[model_id] = [total, steps if optimizer else 0.0]

    async def drop(self, model_id: str) -> None:
        await self._one("drop")
        self.models.pop(model_id, None)

    async def compute(self, model_id: str, work: ForwardBackward) -> Losses:
        """Log-probs are -targets / 10, and the loss is the number of tokens."""
        await self._one(f"{work.loss_fn} {'backward' if work.backward else 'forward'}")
        rows = [(-np.frombuffer(each.targets, dtype="<i4") / 10).astype("<f4").tobytes() for each in work.data]
        loss = float(sum(each.num_tokens for each in work.data))
        if work.backward:
            self.models[model_id][0] += loss
        return Losses(rows, loss)

    async def step(self, model_id: str, params: AdamParams) -> float:
        await self._one(f"step {params.learning_rate:g}")
        if params.learning_rate > 100:
            raise FailedPrecondition("not finite")
        self.models[model_id][1] += 1
        return self.models[model_id][0]

    async def save(self, model_id: str, file: Path) -> None:
        await self._one("save")
        file.write_text(json.dumps(self.models[model_id]))

    async def save_adapter(self, model_id: str, folder: Path) -> None:
        await self._one("save_adapter")
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(json.dumps(self.models[model_id]))


class EchoingEngines:
    """A response is the prompt's first token and the adapter's total."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.held.set()

    async def sample(self, adapter: Path | None, work: Sample) -> tuple[Sequence[Completion], Sequence[float] | None]:
        await self.held.wait()
        total = 0 if adapter is None else int(json.loads((adapter / "adapter_model.safetensors").read_text())[0])
        responses = [Completion([work.prompt[0], total], [-0.5, -0.25], i == 0) for i in range(work.num_samples)]
        return responses, [-0.5] * (len(work.prompt) - 1) if work.prompt_log_probs else None
