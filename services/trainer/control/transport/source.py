"""The weights that engines are given: the policy's, in the form in which the engines' checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from headrace.models.block_fp8 import BlockFp8
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.hugging_face.export import Look, Write
from services.trainer.model.policy import Policy
from services.trainer.weights.block_fp8 import quantized, quantized_specs


class WeightSource(Protocol):
    """The part of a policy that a sender needs."""

    def hf_tensor_specs(self) -> list[TensorSpec]:
        """The tensors that this stage's sender yields, in order."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (Hugging Face name, whole tensor) on senders, nothing elsewhere."""

    def export(self, folder: Path, file_bytes: int, look: Look, write: Write | None = None) -> None:
        """Collective: a complete Hugging Face folder of the current weights."""

    def probe(self) -> tuple[list[int], list[float]] | None:
        """Collective: a short sequence and its log-probs; None except on last-stage ranks."""


class QuantizedWeights:
    """A policy's weights in block FP8; what engines compute is compared with the policy itself."""

    def __init__(self, policy: Policy, form: BlockFp8) -> None:
        self._policy = policy
        self._form = form

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return quantized_specs(self._form, self._policy.hf_tensor_specs())

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return quantized(self._form, self._policy.hf_tensors())

    def export(self, folder: Path, file_bytes: int, look: Look, write: Write | None = None) -> None:
        self._policy.export(folder, file_bytes, look, write, self._form)

    def probe(self) -> tuple[list[int], list[float]] | None:
        return self._policy.probe()
