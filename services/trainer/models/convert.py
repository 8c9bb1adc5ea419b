"""Weights between a Hugging Face folder and the ranks' shards, tensor by tensor: never a whole model twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor

from headrace.config.architecture import Architecture
from headrace.errors import ConfigError, InvalidArgument
from services.trainer.buckets import TensorSpec
from services.trainer.models.model_shard import ModelShard
from services.trainer.models.shards import Replicated
from services.trainer.models.table import Row, stage_rows, table
from services.trainer.models.transformer_engine import fused_name
from services.trainer.parallel import Layout

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TIED_HEAD = "lm_head.weight"


class HfFolder:
    """The tensors of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = self._weight_map()

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with safe_open(str(self._folder / self.files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _weight_map(self) -> Mapping[str, str]:
        if (self._folder / _INDEX).is_file():
            index: dict[str, str] = json.loads((self._folder / _INDEX).read_text())["weight_map"]
            return index
        if not (self._folder / _SINGLE).is_file():
            raise ConfigError(
                f"hf_checkpoint {self._folder} has neither {_SINGLE} nor {_INDEX}: export it as safetensors"
            )
        with safe_open(str(self._folder / _SINGLE), framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)


class Converter:
    """One rank's part of a model in both directions."""

    def __init__(self, architecture: Architecture, layout: Layout, model: GPTModel) -> None:
        self._architecture = architecture
        self._layout = layout
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        self._rows = [Row(self._name(row.megatron), row.hf, row.sharding) for row in stage_rows(architecture, layout)]
        self._check_covered(model)
        self._mark_sharded()

    def load(self, folder: Path) -> None:
        """Fills this rank's parameters. Raises ConfigError that lists missing and extra tensors of the folder."""
        source = HfFolder(folder)
        self._check_names(source, folder)
        for row in self._rows:
            parameter = self._parameters[row.megatron]
            parts = [source.tensor(name) for name in row.hf]
            self._fill(parameter, row, parts)
        if self._has_tied_copy:
            head = next(row for row in table(self._architecture) if row.megatron.startswith("embedding"))
            self._fill(self._parameters["output_layer.weight"], head, [source.tensor(head.hf[0])])

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective over tensor ranks: yields (name, whole tensor) on tensor rank 0 of each stage, else nothing."""
        for row in self._rows:
            shards = self._gather(self._parameters[row.megatron].detach())
            if self._layout.tp_rank == 0:
                yield from zip(row.hf, row.sharding.merge(shards), strict=True)

    def hf_tensor_specs(self) -> list[TensorSpec]:
        """What hf_tensors yields on tensor rank 0, in that order, without moving anything."""
        specs = []
        for row in self._rows:
            parameter = self._parameters[row.megatron]
            shards = [torch.empty_like(parameter, device="meta") for _ in range(self._layout.tp_size)]
            for name, whole in zip(row.hf, row.sharding.merge(shards), strict=True):
                specs.append(TensorSpec(name, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")))
        return specs

    def shards(self) -> list[ModelShard]:
        """Every parameter of this rank with its place in the whole model, in the table's order."""
        found = [self._shard(row, row.hf[0]) for row in self._rows]
        if self._has_tied_copy:
            head = next(row for row in table(self._architecture) if row.megatron.startswith("embedding"))
            copy = self._shard(Row("output_layer.weight", head.hf, head.sharding), head.hf[0])
            found.append(replace(copy, replica=0, num_replicas=0, speaks=False))
        return found

    def _shard(self, row: Row, key: str) -> ModelShard:
        layout, is_replicated = self._layout, isinstance(row.sharding, Replicated)
        return ModelShard(
            key=key,
            parameter=self._parameters[row.megatron],
            sharding=row.sharding,
            shard=0 if is_replicated else layout.tp_rank,
            num_shards=1 if is_replicated else layout.tp_size,
            replica=layout.dp_rank * layout.tp_size + layout.tp_rank if is_replicated else layout.dp_rank,
            num_replicas=layout.dp_size * layout.tp_size if is_replicated else layout.dp_size,
            speaks=layout.tp_rank == 0 or not is_replicated,
        )

    @property
    def _has_tied_copy(self) -> bool:
        tied = not self._architecture.untie_embeddings_and_output_weights
        return tied and self._layout.is_last_stage and not self._layout.is_first_stage

    def _name(self, megatron: str) -> str:
        return megatron if megatron in self._parameters else fused_name(megatron)

    def _mark_sharded(self) -> None:
        """Megatron marks shards while it initializes them, which is skipped here; the gradient norm needs them."""
        for row in self._rows:
            self._parameters[row.megatron].tensor_model_parallel = not isinstance(row.sharding, Replicated)
        if self._has_tied_copy:
            self._parameters["output_layer.weight"].tensor_model_parallel = True

    def _fill(self, parameter: Tensor, row: Row, parts: list[Tensor]) -> None:
        shard = row.sharding.shard(parts, self._layout.tp_rank, self._layout.tp_size)
        if shard.shape != parameter.shape:
            raise ConfigError(
                f"{', '.join(row.hf)}: shapes {[list(p.shape) for p in parts]} do not make {row.megatron} "
                f"of shape {list(parameter.shape)}: the weights and config.json are of different models"
            )
        with torch.no_grad():
            parameter.copy_(shard)

    def _gather(self, shard: Tensor) -> list[Tensor]:
        if self._layout.tp_size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self._layout.tp_size)]
        dist.all_gather(shards, shard.contiguous(), group=self._layout.tp_group)
        return shards

    def _check_covered(self, model: GPTModel) -> None:
        covered = {row.megatron for row in self._rows} | ({"output_layer.weight"} if self._has_tied_copy else set())
        uncovered = self._parameters.keys() ^ covered
        if uncovered:
            raise InvalidArgument(
                f"the table of {self._architecture.family} does not fit the model: {sorted(uncovered)}"
            )

    def _check_names(self, source: HfFolder, folder: Path) -> None:
        layers = range(self._architecture.num_layers)
        expected = {
            name.format(layer=layer) for row in table(self._architecture) for name in row.hf for layer in layers
        }
        found = {name for name in source.files if not name.endswith("rotary_emb.inv_freq")}
        if not self._architecture.untie_embeddings_and_output_weights:
            found.discard(_TIED_HEAD)  # some exporters write the tied head too
        if missing := sorted(expected - found):
            raise ConfigError(f"{folder} lacks {len(missing)} tensors that its config.json asks for: {missing[:5]}")
        if extra := sorted(found - expected):
            raise ConfigError(f"{folder} holds {len(extra)} tensors that its config.json does not name: {extra[:5]}")
