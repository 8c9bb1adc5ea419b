"""Weights between a Hugging Face folder and the ranks' shards, tensor by tensor: never a whole model twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from headrace.errors import ConfigError, InvalidArgument
from headrace.models.architecture import Architecture
from headrace.models.family import Replicated, Row, Sharding
from headrace.models.registry import table
from headrace.models.torch_dist import FUSED_NORMS, is_torch_dist
from headrace.publication import TensorSpec
from services.trainer.hugging_face.hf_folder import HfFolder, check_names
from services.trainer.hugging_face.shards import ModelShard, cut, merge, weights_of
from services.trainer.hugging_face.torch_dist import TorchDistFolder
from services.trainer.megatron.configs import mark_sequence_parallel, mark_tensor_parallel
from services.trainer.megatron.parallel import Layout


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of this pipeline rank, and this rank's parameter for it; for another rank's expert, one that is alike."""

    row: Row
    name: str
    """The parameter as weights_of names it."""
    owner: int
    """The expert rank that holds it; 0 for what all hold."""
    weight: Tensor
    sharding: Sharding
    """The table's, or Replicated for what this build keeps whole: Transformer Engine's latent projections."""
    rank: int
    size: int
    """Tensor ranks that divide it"""
    group: dist.ProcessGroup
    data_rank: int
    data_size: int
    """Data ranks that hold the same"""

    def shard(self, key: str, parameter: Tensor, sharding: Sharding) -> ModelShard:
        """A parameter that lies where this one does, as a part of the tensor `key`."""
        return ModelShard.of(
            key,
            parameter,
            sharding,
            rank=self.rank,
            size=self.size,
            data_rank=self.data_rank,
            data_size=self.data_size,
        )


def rows_of(architecture: Architecture, layout: Layout, chunks: Sequence[GPTModel]) -> Iterator[tuple[Row, str, int]]:
    """This rank's rows, of one virtual stage after the other, with names as in layers without Transformer Engine.

    The number is the expert rank that holds it. With tied embeddings the last stage's copy has no row.
    """
    rows = table(architecture)
    for number, chunk in enumerate(chunks):
        if chunk.pre_process:
            yield from ((row, f"{number}.{row.megatron}", 0) for row in rows.first)
        for local, layer in enumerate(chunk.decoder.layers):
            for row in rows.layer(layer.layer_number - 1):
                owner, name = 0, row.megatron
                if row.expert is not None and architecture.experts is not None:
                    owner, expert = divmod(row.expert, architecture.experts.count // layout.ep_size)
                    name = name.format(expert=expert)
                yield row, f"{number}.decoder.layers.{local}.{name}", owner
        if chunk.post_process:
            yield from ((row, f"{number}.{row.megatron}", 0) for row in rows.last)


_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")


def fused_name(megatron_name: str) -> str:
    """The name in a Transformer Engine layer; most stay."""
    for plain, fused in FUSED_NORMS.items():
        if megatron_name.endswith("." + plain):
            return megatron_name.removesuffix(plain) + fused
    return _EXPERT.sub(r".\2.\3\1", megatron_name)


class Converter:
    def __init__(self, architecture: Architecture, layout: Layout, chunks: Sequence[GPTModel]) -> None:
        self._architecture = architecture
        self._layout = layout
        self._weights = weights_of(chunks)
        self._deltas: Mapping[str, Callable[[], Tensor]] = {}
        rows = [(row, self._name(name), owner) for row, name, owner in rows_of(architecture, layout, chunks)]
        tied = f"{len(chunks) - 1}.output_layer.weight"
        is_tied = not architecture.untie_embeddings_and_output_weights
        has_copy = is_tied and chunks[-1].post_process and not chunks[0].pre_process
        self._require_covered({name for _, name, _ in rows} | ({tied} if has_copy else set()))
        self._placed = [self._place(*row) for row in rows]
        self._tied_copy = self._place(table(architecture).first[0], tied, 0) if has_copy else None
        """Of the embedding, on the last stage"""
        self._mark_sharded()

    def load(self, folder: Path) -> None:
        """Fills this rank's weights from a Hugging Face folder, or from one of Megatron's checkpoints.

        Raises ConfigError that lists missing and extra tensors of the folder.
        """
        source = self._source(folder)
        for placed in (*self.held(), *([self._tied_copy] if self._tied_copy else [])):
            self._fill(placed, source.parts(placed.row))

    def add_deltas(self, deltas: Mapping[str, Callable[[], Tensor]]) -> None:
        """Weights leave with these added to them from here on: float32 of a shard's shape, by the weight's name."""
        self._deltas = deltas

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective over a stage: yields (name, whole tensor) on its first rank, nothing elsewhere."""
        stacked: dict[str, Tensor] = {}
        for placed in self._placed:
            wholes = self._shared_by_experts(placed) if placed.row.expert is not None else self._merged(placed)
            if self._layout.tp_rank == 0 and self._layout.dp_rank == 0:
                for tensor, whole in zip(placed.row.hf, wholes, strict=True):
                    if tensor.slot is None:
                        yield tensor.name, whole
                        continue
                    stack = stacked.setdefault(tensor.name, whole.new_empty(tensor.whole.shape))
                    stack[tensor.slot] = whole
                    if tensor.slot == tensor.slots - 1:
                        yield tensor.name, stacked.pop(tensor.name)

    def hf_tensor_specs(self) -> list[TensorSpec]:
        """The tensors that `hf_tensors` yields on the first rank of a stage, in that order. Moves nothing."""
        return [
            TensorSpec(tensor.name, tensor.whole.shape, str(placed.weight.dtype).removeprefix("torch."))
            for placed in self._placed
            for tensor in placed.row.hf
            if not tensor.slot
        ]

    def shards(self) -> list[ModelShard]:
        """Every weight of this rank with its place in the whole model, in the table's order."""
        found = [self._shard(placed) for placed in self.held()]
        if self._tied_copy:
            found.append(replace(self._shard(self._tied_copy), replica=0, num_replicas=0, is_reporting=False))
        return found

    def held(self) -> Iterator[Placed]:
        """The rows of this rank, in the table's order; the copy of a tied embedding is none."""
        return (p for p in self._placed if p.row.expert is None or p.owner == self._layout.ep_rank)

    def _place(self, row: Row, name: str, owner: int) -> Placed:
        layout, weight = self._layout, self._weights[name]
        if row.expert is None:
            rank, size, group = layout.tp_rank, layout.tp_size, layout.tp_group
            data_rank, data_size = layout.dp_rank, layout.dp_size
        else:
            rank, size, group = layout.etp_rank, layout.etp_size, layout.etp_group
            data_rank, data_size = layout.edp_rank, layout.edp_size
        is_whole = len(row.hf) == 1 and row.hf[0].shape == tuple(weight.shape)
        sharding = Replicated() if is_whole and size > 1 else row.sharding
        return Placed(row, name, owner, weight, sharding, rank, size, group, data_rank, data_size)

    def _source(self, folder: Path) -> HfFolder | TorchDistFolder:
        if is_torch_dist(folder):
            return TorchDistFolder(folder, self._architecture)
        source = HfFolder(folder, self._architecture)
        check_names(source, self._architecture)
        return source

    def _shard(self, placed: Placed) -> ModelShard:
        return placed.shard(placed.row.hf[0].key, placed.weight, placed.sharding)

    def _name(self, megatron: str) -> str:
        return megatron if megatron in self._weights else fused_name(megatron)

    def _mark_sharded(self) -> None:
        """Megatron marks shards while it initializes them, which is skipped here; the gradient norm needs them."""
        for placed in self._placed:
            weight = placed.weight
            if isinstance(weight, nn.Parameter):
                is_expert = placed.row.expert is not None
                mark_tensor_parallel(weight, is_expert or not isinstance(placed.sharding, Replicated))
                if is_expert:  # Megatron marks biases, which would be summed over ranks of other tokens or experts
                    mark_sequence_parallel(weight, False)
        if self._tied_copy:
            mark_tensor_parallel(self._tied_copy.weight, True)

    def _fill(self, placed: Placed, parts: list[Tensor]) -> None:
        found = [tuple(part.shape) for part in parts]
        if found != [tensor.shape for tensor in placed.row.hf]:
            raise ConfigError(
                f"{', '.join(t.name for t in placed.row.hf)}: shapes {[list(s) for s in found]} are not "
                f"{[list(t.shape) for t in placed.row.hf]}: the weights and config.json are of different models"
            )
        with torch.no_grad():
            placed.weight.copy_(cut(placed.sharding, parts, placed.rank, placed.size))

    def _merged(self, placed: Placed) -> list[Tensor]:
        return merge(placed.sharding, gathered(self._leaving(placed), placed.group, placed.size))

    def _leaving(self, placed: Placed) -> Tensor:
        """This rank's weight as others get it."""
        weight, delta = placed.weight.detach(), self._deltas.get(placed.name)
        return weight if delta is None else (weight.float() + delta()).to(weight.dtype)

    def _shared_by_experts(self, placed: Placed) -> Sequence[Tensor]:
        """An expert's whole tensors, from the expert rank that holds them to all."""
        layout = self._layout
        if layout.ep_size == 1:
            return self._merged(placed)
        if placed.owner == layout.ep_rank:
            wholes = [whole.contiguous() for whole in self._merged(placed)]
        else:
            like = placed.weight
            wholes = [torch.empty(t.shape, dtype=like.dtype, device=like.device) for t in placed.row.hf]
        for whole in wholes:
            dist.broadcast(whole, dist.get_global_rank(layout.ep_group, placed.owner), group=layout.ep_group)
        return wholes

    def _require_covered(self, covered: set[str]) -> None:
        if uncovered := self._weights.keys() ^ covered:
            raise InvalidArgument(
                f"the table of {self._architecture.family} does not name the weights of this model: "
                f"{sorted(uncovered)}: this is a bug of headrace"
            )


def gathered(one: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    """Collective: the shards of `size` ranks, in their order."""
    if size == 1:
        return [one]
    shards = [torch.empty_like(one) for _ in range(size)]
    dist.all_gather(shards, one.contiguous(), group=group)
    return shards
