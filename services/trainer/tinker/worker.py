"""What rank 0 asks of every rank for Tinker's clients, in the rank's compute thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from headrace.disk import sync
from headrace.errors import HeadraceError
from headrace.job.megatron import megatron
from headrace.job.schema.job import Job
from headrace.models.registry import read_architecture
from services.trainer.collective_io import write_tensors
from services.trainer.control.worker import command
from services.trainer.durable import new_folder, put_in_place
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics import Stopwatch
from services.trainer.model.build import model_of
from services.trainer.model.lora import CONFIG, WEIGHTS
from services.trainer.model.pipeline import Runner, TokenHead
from services.trainer.tinker.slots import LoraSlots
from services.trainer.tinker.work import AdamParams, Datum, LoraSpec, LossShare

_MICRO_BATCH_TOKENS = 2048
"""Of a micro-batch without max_tokens_per_gpu."""


def slots_of(job: Job, layout: Layout) -> LoraSlots:
    """The base with adapters of the job's rank, and no models yet."""
    args, architecture = megatron(job.megatron), read_architecture(job.model.hf_checkpoint)
    model, adapters = model_of(job, architecture, args, layout)
    assert adapters is not None, "the job's rules ask for lora_rank"
    runner = Runner(model.config, model.stages, layout, model.packing, Stopwatch(layout.device))
    return LoraSlots(
        adapters,
        runner,
        TokenHead(model.stages[-1], layout),
        layout,
        model.packing,
        max_tokens=job.train.max_tokens_per_gpu or _MICRO_BATCH_TOKENS,
    )


class TinkerWorker:
    """One rank's share. What a client can do wrong is found before a command: an error of one ends the rank."""

    def __init__(self, slots: LoraSlots, layout: Layout) -> None:
        self._slots = slots
        self._layout = layout

    @command
    def create(self, name: str, spec: LoraSpec) -> None:
        self._slots.create(name, spec)

    @command
    def refusal(self, file: str) -> str | None:
        """Why no model can be made of a saved one; None if it can."""
        return _refusal(lambda: self._slots.require_fits(Path(file)))

    @command
    def load(self, name: str, spec: LoraSpec, file: str, optimizer: bool) -> None:
        self._slots.load(name, spec, Path(file), optimizer=optimizer)

    @command
    def drop(self, name: str) -> None:
        self._slots.drop(name)

    @command
    def compute(
        self, name: str, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], backward: bool
    ) -> LossShare | None:
        """Log-probs and loss; with `backward` gradients are added up."""
        return self._slots.compute(name, data, loss_fn, settings, backward=backward)

    @command
    def step(self, name: str, params: AdamParams) -> float:
        """Adam; returns the gradient's norm."""
        return self._slots.step(name, params)

    @command
    def save(self, name: str, file: str) -> str | None:
        """Writes the model with Adam's state; returns why it could not."""
        tensors = self._slots.state(name)
        return _refusal(lambda: _write_state(Path(file), tensors)) if self._layout.rank == 0 else None

    @command
    def save_adapter(self, name: str, folder: str) -> str | None:
        """Writes the model as peft does; returns why it could not."""
        matrices, config = self._slots.peft(name), self._slots.peft_config(name)
        return _refusal(lambda: _write_peft(Path(folder), matrices, config)) if self._layout.rank == 0 else None

    @command
    def leave(self) -> None: ...


def _write_state(file: Path, tensors: Mapping[str, Tensor]) -> None:
    draft = file.with_name(f".{file.name}.draft")
    write_tensors(draft, tensors)
    sync(draft)
    put_in_place(draft, file)


def _write_peft(folder: Path, matrices: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    with new_folder(folder) as draft:
        write_tensors(draft / WEIGHTS, matrices, {"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(config, indent=2))


def _refusal(work: Callable[[], None]) -> str | None:
    try:
        work()
    except HeadraceError as error:
        return error.message
    except (OSError, SafetensorError) as error:
        return f"the disk refuses: {error}"
    return None
