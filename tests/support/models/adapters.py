"""Adapters of tiny models in peft's form, and a model with them in float64, where peft itself cannot make it.

transformers keeps all experts of a layer in one tensor, for which peft has adapters of another form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.job.model import adapted_layers, layer_name
from headrace.job.schema.training import LoraSection
from headrace.models.registry import read_architecture
from services.trainer.model.lora import PeftFolder, write_peft

_STACKED = re.compile(r"(.*\.experts\.\w+_proj)\.(\d+)$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")

_MINIMAX = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight$")
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def make_adapters(model: Path, folder: Path, lora: LoraSection) -> Path:
    """Random A and B for every layer that the section names."""
    random, rank = torch.Generator().manual_seed(3), lora.lora_rank or 0
    architecture, matrices = read_architecture(model), {}
    for tensor in adapted_layers(architecture, lora.lora_target_modules):
        size_out, size_in = tensor.shape
        for name, shape in (("lora_A", (rank, size_in)), ("lora_B", (size_out, rank))):
            matrices[f"{layer_name(tensor.key)}.{name}.weight"] = torch.randn(shape, generator=random) * 0.1
    write_peft(folder, model, architecture, lora, matrices)
    return folder


@dataclass(frozen=True)
class Merged:
    """A transformers model in float64 whose weights have the adapters of a folder added; gradients are of A and B."""

    network: Any
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """By the weight's name"""
    scale: float

    @classmethod
    def of(cls, network: Any, model: Path, folder: Path, lora: LoraSection, scale: float) -> Merged:
        """Changes the network's weights."""
        architecture = read_architecture(model)
        source = PeftFolder(folder, architecture, lora)
        found = {tensor.key: source(tensor) for tensor in adapted_layers(architecture, lora.lora_target_modules)}
        names, pairs = list(found), {name: (pair.a.double(), pair.b.double()) for name, pair in found.items()}
        merged = cls(network, pairs, scale)
        with torch.no_grad():
            for name, weight in merged.weights(names):
                a, b = merged.pairs[name]
                weight += scale * (b @ a)
        return merged

    def weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Views of the network's own parameters, by their names in a checkpoint."""
        parameters = dict(self.network.named_parameters())
        yield from ((name, view_of(parameters, name)) for name in names)

    def gradients(self) -> dict[str, Tensor]:
        """After a backward pass, by the names that A and B have in a checkpoint."""
        of_weights = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        found = {}
        for name, (a, b) in self.pairs.items():
            whole = view_of(of_weights, name)
            layer = layer_name(name)
            found[f"{layer}.lora_A.weight"] = self.scale * (b.T @ whole)
            found[f"{layer}.lora_B.weight"] = self.scale * (whole @ a.T)
        return found


def view_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The part of a transformers model's tensors that a checkpoint calls so."""
    if match := _MINIMAX.match(name):
        name = f"{match[1]}.mlp.experts.{match[2]}.{_PROJECTIONS[match[3]]}.weight"
    name = name.replace(".block_sparse_moe.", ".mlp.").replace("backbone.", "model.")
    if stacked := _STACKED.match(name):
        return _called(tensors, stacked[1])[int(stacked[2])].T
    if (match := _EXPERT.match(name)) is None:
        return _called(tensors, name)
    layer, expert, kind = match.groups()
    if kind == "down" or f"{layer}.{kind}_proj" in tensors:
        return _called(tensors, f"{layer}.{kind}_proj")[int(expert)]
    return _called(tensors, f"{layer}.gate_up_proj")[int(expert)].chunk(2)[kind == "up"]


def _called(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A decoder beside a vision tower is the model's own in a model of text alone."""
    alone = name.replace("language_model.model.", "model.", 1).replace("model.language_model.", "model.", 1)
    beside = alone.replace("model.", "model.language_model.", 1)
    return next(tensors[each] for each in (name, alone, beside) if each in tensors)
