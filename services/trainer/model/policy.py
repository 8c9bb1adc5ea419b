"""One rank's share of the policy: its part of the model, of every batch, and of the optimizer.

Everything here runs in the rank's compute thread. All ranks call the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from headrace.models.block_fp8 import BlockFp8
from headrace.trajectory import Sample
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.data.reading import FetchSamples, UnusableSample
from services.trainer.devices.memory import RankMemory
from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.export import FILE_BYTES, Look, Write, export
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics.speed import Speed
from services.trainer.metrics.stopwatch import Stopwatch
from services.trainer.model.batches import BatchReader
from services.trainer.model.optimizer_steps import OptimizerSteps
from services.trainer.model.pipeline import Pipeline
from services.trainer.model.preparation import Preparation
from services.trainer.model.saved import SavedParts
from services.trainer.plan.batch import SampleFacts
from services.trainer.weights.block_fp8 import quantized, quantized_specs
from services.trainer.weights.probe_sample import probe_sample


class Policy:
    """The model that is trained. `hf_checkpoint` is the folder it began as.

    `saved` is what a checkpoint holds, and `memory` what is on the device.
    """

    def __init__(
        self,
        layout: Layout,
        batches: BatchReader,
        prepare: Preparation,
        optimizer_steps: OptimizerSteps,
        pipeline: Pipeline,
        converter: Converter,
        saved: SavedParts,
        stopwatch: Stopwatch,
        speed: Speed,
        memory: RankMemory,
        *,
        hf_checkpoint: Path,
        vocab_size: int,
    ) -> None:
        self.saved = saved
        self.memory = memory
        self.set_aside: Sequence[UnusableSample] = ()
        """Samples of the latest step that it could not use; equal on all ranks."""
        self.trained_ids: Sequence[str] = ()
        """This rank's samples of the latest step."""
        self.is_logged = False
        """A user's function has logged the latest step's rollout; equal on all ranks."""
        self._layout = layout
        self._batches = batches
        self._prepare = prepare
        self._optimizer_steps = optimizer_steps
        self._pipeline = pipeline
        self._converter = converter
        self._stopwatch = stopwatch
        self._speed = speed
        self._hf_checkpoint = hf_checkpoint
        self._vocab_size = vocab_size

    def train(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> dict[str, float]:
        """The optimizer steps of one rollout step; metrics are equal on all ranks, but for times."""
        with self._stopwatch.host_part("fetch"):
            batch = self._batches.read(step, samples, fetch)
        self.set_aside, self.is_logged = batch.set_aside, batch.is_logged
        self.trained_ids = [i for plan in batch.plans for i in plan.sample_ids(self._layout.data_rank)]
        with self._stopwatch.part("log_probs"):
            prepared = self._prepare(step, batch.inputs)
        metrics = self._optimizer_steps(step, batch.plans, prepared)
        metrics = {**batch.metrics, **metrics, **self._pipeline.distance.read(), **self._prepare.metrics()}
        return metrics | self._speed.metrics(batch.samples, self._stopwatch.read())

    def own_sample_ids(self, samples: Sequence[SampleFacts]) -> list[str]:
        """The ids of the samples that `train` will fetch on this rank, in that order."""
        return self._batches.own_sample_ids(samples)

    def log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens [R] under the current weights; [] except on last-stage ranks.

        `temperature` absent: the rollouts'.
        """
        return self._pipeline.response_log_probs(samples, temperature)

    def probe(self) -> tuple[list[int], list[float]] | None:
        """Collective: a short sequence and its log-probs under the current weights; None except on last-stage ranks."""
        sample = probe_sample(self._vocab_size)
        found = self.log_probs([sample], temperature=1.0)
        return (sample.tokens.tolist(), found[0].tolist()) if found else None

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (Hugging Face name, whole tensor) on senders, nothing elsewhere."""
        if self._layout.gathers:
            yield from self._converter.hf_tensors()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        """The tensors that this stage's sender yields, in order."""
        return self._converter.hf_tensor_specs()

    def export(
        self,
        folder: Path,
        file_bytes: int = FILE_BYTES,
        look: Look = lambda content: None,
        write: Write | None = None,
        form: BlockFp8 | None = None,
    ) -> None:
        """Collective: a complete Hugging Face folder of the current weights; `look` sees each file's content first."""
        tensors, specs = self.hf_tensors(), self.hf_tensor_specs()
        if form is not None:
            tensors, specs = quantized(form, tensors), quantized_specs(form, specs)
        export(tensors, specs, self._hf_checkpoint, folder, self._layout, file_bytes, look, write)
