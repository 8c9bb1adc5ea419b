"""One rank's share of the policy: its part of the model, of every batch, of the optimizer and of a checkpoint.

Everything here runs in the rank's compute thread. All ranks call the same methods in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headrace.errors import ConfigError, DataLoss
from headrace.models.architecture import Architecture
from headrace.models.folders import QuantizedForm
from headrace.publication import TensorSpec
from headrace.rpc import tracing
from headrace.trajectory import Sample, Status
from services.trainer.checkpoint.manifest import ShardChunk
from services.trainer.checkpoint.resharding import CheckpointReader, ModelState, RandomState
from services.trainer.data.samples import FetchSamples, UnusableSample
from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.export import FILE_BYTES, Look, Write, export
from services.trainer.hugging_face.shards import ModelShard
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics import Speed, Stopwatch
from services.trainer.model.frozen_policies import OldPolicies
from services.trainer.model.lora import Adapters
from services.trainer.model.memory import RankMemory
from services.trainer.model.pipeline import Pipeline
from services.trainer.model.rollout_step import BatchReader, OptimizerSteps, Preparation
from services.trainer.plan.batch import SampleFacts
from services.trainer.weights.quantization import quantized, quantized_specs

POLICY = "policy"
"""The name of the part that is trained"""
_MODEL = "model"
"""The scalars that say which model it is"""
_LORA = "lora"


@dataclass(frozen=True, slots=True)
class SavedParts:
    """One rank's share of a checkpoint of the model with these `facts`. `others` have no scalars."""

    facts: Mapping[str, Any]
    models: Sequence[ModelState]
    others: Sequence[RandomState | OldPolicies]

    def chunks(self) -> Iterator[ShardChunk]:
        """Weights, optimizer, random states: all ranks' chunks together are everything, each once."""
        for part in (*self.models, *self.others):
            yield from part.chunks()

    def scalars(self) -> dict[str, Any]:
        scalars = {name: value for model in self.models for name, value in model.scalars().items()}
        return {_MODEL: self.facts} | scalars

    def restore(self, reader: CheckpointReader) -> None:
        """Restores this share bit for bit, whatever layout wrote it. Raises DataLoss unless it is of this model."""
        require_same_model(reader, self.facts)
        for part in (*self.models, *self.others):
            part.restore(reader)


def require_same_model(reader: CheckpointReader, here: Mapping[str, Any]) -> None:
    """Raises DataLoss that names facts in which two models differ; their tensors may have the same shapes."""
    saved, own = (_options(facts) for facts in (reader.scalars[_MODEL], here))
    known = sorted((saved.keys() | own.keys()) - _NOT_TRAINED)
    names = [name for name in known if not _is_same(saved.get(name), own.get(name))]
    if not names:
        return
    differences = "; ".join(f"{name} {_said(saved.get(name))} there, {_said(own.get(name))} here" for name in names[:5])
    if all(name.startswith(_LORA) for name in names):
        raise DataLoss(
            f"the checkpoint has other adapters: {differences}: resume with the --lora-* options that it was saved "
            "with, or take its weights alone with --initial-megatron-checkpoint"
        )
    raise DataLoss(
        f"the checkpoint is of another model: {differences}: resume with the --hf-checkpoint that it was saved with, "
        "or take its weights alone with --initial-megatron-checkpoint"
    )


_NOT_TRAINED = frozenset({"kept", "num_mtp_layers"})
"""Facts of what a checkpoint does not hold; the second is of earlier releases."""


def _is_same(one: Any, other: Any) -> bool:
    """An earlier release did not save what no model of its own had: that is as unset as None, False and nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_is_same(one.get(name), other.get(name)) for name in one.keys() | other.keys())
    return bool((one or None) == (other or None))


def _options(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with those of adapters beside the others, by their options' names."""
    lora = {f"{_LORA}_{name}": value for name, value in facts.get(_LORA, {}).items()}
    return {name: value for name, value in facts.items() if name != _LORA} | lora


def _said(value: Any) -> str:
    if value is None:
        return "unset"
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def start_from(reader: CheckpointReader, shards: Sequence[ModelShard], adapters: Adapters | None) -> None:
    """Takes the weights alone of another run's checkpoint, adapters too. Raises ConfigError where they are unused."""
    if _LORA not in reader.scalars[_MODEL]:
        ModelState(POLICY, shards, None).restore_weights(reader)
        return
    if adapters is None:
        raise ConfigError(
            "initial_megatron_checkpoint has adapters of LoRA: pass the --lora-* options that it was saved with, or "
            "start from an export of it",
            field="initial_megatron_checkpoint",
        )
    ModelState(POLICY, [*shards, *adapters.shards], None).restore_weights(reader)


def model_facts(architecture: Architecture, adapters: Adapters | None) -> dict[str, Any]:
    """The architecture as a checkpoint's JSON has it, and what its adapters are if it has any."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return facts | ({_LORA: dict(adapters.facts)} if adapters else {})


LENGTH = 16
_STRIDE = 7919  # a prime: ids from all over the vocabulary


def probe_sample(vocab_size: int) -> Sample:
    """One token of prompt, the others as its response."""
    tokens = np.arange(1, LENGTH + 1, dtype=np.int64) * _STRIDE % vocab_size
    return Sample(
        sample_id="probe",
        group_id="probe",
        index=0,
        prompt="",
        response="",
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(LENGTH - 1, dtype=np.uint8),
        rollout_log_probs=np.zeros(LENGTH - 1, dtype=np.float32),
        status=Status.COMPLETED,
    )


@dataclass(slots=True)
class Policy:
    """The model that is trained. `hf_checkpoint` is the folder it began as.

    `saved` is what a checkpoint holds, and `memory` what is on the device.
    """

    layout: Layout
    batches: BatchReader
    prepare: Preparation
    optimizer_steps: OptimizerSteps
    pipeline: Pipeline
    converter: Converter
    saved: SavedParts
    stopwatch: Stopwatch
    speed: Speed
    memory: RankMemory
    _: KW_ONLY
    adapters: Adapters | None
    hf_checkpoint: Path
    vocab_size: int
    set_aside: Sequence[UnusableSample] = ()
    """Samples of the latest step that it could not use; equal on all ranks."""
    trained_ids: Sequence[str] = ()
    """This rank's samples of the latest step."""
    is_logged: bool = False
    """A user's function has logged the latest step's rollout; equal on all ranks."""

    def train(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> dict[str, float]:
        """The optimizer steps of one rollout step; metrics are equal on all ranks, but for times."""
        facts = {tracing.LANE: f"rank {self.layout.rank}", tracing.STEP: step}
        with tracing.span("headrace.rank", tracing.step(step), facts):
            with self.stopwatch.host_part("fetch"):
                batch = self.batches.read(step, samples, fetch)
            self.set_aside, self.is_logged = batch.set_aside, batch.is_logged
            self.trained_ids = [i for plan in batch.plans for i in plan.sample_ids(self.layout.data_rank)]
            with self.stopwatch.part("log_probs"):
                prepared = self.prepare(step, batch.inputs)
            metrics = self.optimizer_steps(step, batch.plans, prepared)
            metrics = {**batch.metrics, **metrics, **self.pipeline.distance.read(), **self.prepare.metrics()}
            return metrics | self.speed.metrics(batch.samples, self.stopwatch.read())

    def log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens [R] under the current weights; [] except on last-stage ranks.

        `temperature` absent: the rollouts'.
        """
        return self.pipeline.response_log_probs(samples, temperature)

    def probe(self) -> tuple[list[int], list[float]] | None:
        """Collective: a short sequence and its log-probs under the current weights; None except on last-stage ranks."""
        sample = probe_sample(self.vocab_size)
        found = self.log_probs([sample], temperature=1.0)
        return (sample.tokens.tolist(), found[0].tolist()) if found else None

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (Hugging Face name, whole tensor) on senders, nothing elsewhere."""
        if self.layout.joins_gather:
            yield from self.converter.hf_tensors()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return self.converter.hf_tensor_specs()

    def export(
        self,
        folder: Path,
        file_bytes: int = FILE_BYTES,
        look: Look = lambda content: None,
        write: Write | None = None,
        form: QuantizedForm | None = None,
    ) -> None:
        """Collective: a complete Hugging Face folder of the current weights; `look` sees each file's content first."""
        tensors, specs = self.hf_tensors(), self.hf_tensor_specs()
        if form is not None:
            tensors, specs = quantized(form, tensors), quantized_specs(form, specs)
        export(tensors, specs, self.hf_checkpoint, folder, self.layout, file_bytes, look, write)
