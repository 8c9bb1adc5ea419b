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
class Held:
    """A row whose parameter this rank holds."""

    row: Row
    name: str
    """The parameter as weights_of names it."""
    weight: Tensor
    sharding: Sharding
    """The table's, or Replicated for what this build keeps whole: Transformer Engine's latent projections."""
    rank: int
    size: int
    """Tensor ranks that divide it"""
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


@dataclass(frozen=True, slots=True)
class Placed:
    row: Row
    name: str
    """The parameter as weights.py names it; of another rank's expert, the one in the same place here."""
    owner: int
    """The expert rank that holds it; 0 for what all hold."""


def placed_rows(architecture: Architecture, layout: Layout, chunks: Sequence[GPTModel]) -> Iterator[Placed]:
    """This rank's rows, of one virtual stage after the other. With tied embeddings the last one's copy has none."""
    rows = table(architecture)
    for number, chunk in enumerate(chunks):
        if chunk.pre_process:
            yield from (Placed(row, f"{number}.{row.megatron}", 0) for row in rows.first)
        for local, layer in enumerate(chunk.decoder.layers):
            for row in rows.layer(layer.layer_number - 1):
                yield _in_layer(row, f"{number}.decoder.layers.{local}.", architecture, layout)
        if chunk.post_process:
            yield from (Placed(row, f"{number}.{row.megatron}", 0) for row in rows.last)


def _in_layer(row: Row, prefix: str, architecture: Architecture, layout: Layout) -> Placed:
    if row.expert is None or architecture.experts is None:
        return Placed(row, prefix + row.megatron, 0)
    owner, local = divmod(row.expert, architecture.experts.count // layout.ep_size)
    return Placed(row, prefix + row.megatron.format(expert=local), owner)


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
        is_tied = not architecture.untie_embeddings_and_output_weights
        self._has_tied_copy = is_tied and chunks[-1].post_process and not chunks[0].pre_process
        self._tied_copy = f"{len(chunks) - 1}.output_layer.weight"
        self._placed = [
            Placed(placed.row, self._name(placed.name), placed.owner)
            for placed in placed_rows(architecture, layout, chunks)
        ]
        self._check_covered()
        self._mark_sharded()

    def load(self, folder: Path) -> None:
        """Fills this rank's weights from a Hugging Face folder, or from one of Megatron's checkpoints.

        Raises ConfigError that lists missing and extra tensors of the folder.
        """
        source = self._source(folder)
        for placed in self._placed:
            if self._is_here(placed):
                self._fill(self._weights[placed.name], placed, source.parts(placed.row))
        if self._has_tied_copy:
            embedding = self._tied_embedding()
            self._fill(self._weights[self._tied_copy], embedding, source.parts(embedding.row))

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
            TensorSpec(tensor.name, tensor.whole.shape, str(self._weights[placed.name].dtype).removeprefix("torch."))
            for placed in self._placed
            for tensor in placed.row.hf
            if not tensor.slot
        ]

    def shards(self) -> list[ModelShard]:
        """Every weight of this rank with its place in the whole model, in the table's order."""
        found = [self._shard(held) for held in self.held()]
        if self._has_tied_copy:
            copy = self._shard(self._held(self._tied_embedding()))
            found.append(replace(copy, replica=0, num_replicas=0, is_reporting=False))
        return found

    def held(self) -> Iterator[Held]:
        """The rows of this rank, in the table's order; the copy of a tied embedding is none."""
        return (self._held(placed) for placed in self._placed if self._is_here(placed))

    def _held(self, placed: Placed) -> Held:
        layout, shared = self._layout, placed.row.expert is None
        return Held(
            placed.row,
            placed.name,
            self._weights[placed.name],
            self._sharding(placed),
            self._rank(placed),
            self._size(placed),
            layout.dp_rank if shared else layout.edp_rank,
            layout.dp_size if shared else layout.edp_size,
        )

    def _source(self, folder: Path) -> HfFolder | TorchDistFolder:
        if is_torch_dist(folder):
            return TorchDistFolder(folder, self._architecture)
        source = HfFolder(folder, self._architecture)
        check_names(source, self._architecture)
        return source

    def _shard(self, held: Held) -> ModelShard:
        return held.shard(held.row.hf[0].key, held.weight, held.sharding)

    def _tied_embedding(self) -> Placed:
        return Placed(table(self._architecture).first[0], self._tied_copy, 0)

    def _name(self, megatron: str) -> str:
        return megatron if megatron in self._weights else fused_name(megatron)

    def _is_here(self, placed: Placed) -> bool:
        return placed.row.expert is None or placed.owner == self._layout.ep_rank

    def _mark_sharded(self) -> None:
        """Megatron marks shards while it initializes them, which is skipped here; the gradient norm needs them."""
        for placed in self._placed:
            weight = self._weights[placed.name]
            if isinstance(weight, nn.Parameter):
                is_expert = placed.row.expert is not None
                mark_tensor_parallel(weight, is_expert or not isinstance(self._sharding(placed), Replicated))
                if is_expert:  # Megatron marks biases, which would be summed over ranks of other tokens or experts
                    mark_sequence_parallel(weight, False)
        if self._has_tied_copy:
            mark_tensor_parallel(self._weights[self._tied_copy], True)

    def _sharding(self, placed: Placed) -> Sharding:
        tensors = placed.row.hf
        is_whole = len(tensors) == 1 and tensors[0].shape == tuple(self._weights[placed.name].shape)
        return Replicated() if is_whole and self._size(placed) > 1 else placed.row.sharding

    def _rank(self, placed: Placed) -> int:
        return self._layout.tp_rank if placed.row.expert is None else self._layout.etp_rank

    def _size(self, placed: Placed) -> int:
        return self._layout.tp_size if placed.row.expert is None else self._layout.etp_size

    def _fill(self, weight: Tensor, placed: Placed, parts: list[Tensor]) -> None:
        found = [tuple(part.shape) for part in parts]
        if found != [tensor.shape for tensor in placed.row.hf]:
            raise ConfigError(
                f"{', '.join(t.name for t in placed.row.hf)}: shapes {[list(s) for s in found]} are not "
                f"{[list(t.shape) for t in placed.row.hf]}: the weights and config.json are of different models"
            )
        with torch.no_grad():
            weight.copy_(cut(self._sharding(placed), parts, self._rank(placed), self._size(placed)))

    def _merged(self, placed: Placed) -> list[Tensor]:
        group = self._layout.tp_group if placed.row.expert is None else self._layout.etp_group
        shards = gathered(self._leaving(placed.name), group, self._size(placed))
        return merge(self._sharding(placed), shards)

    def _leaving(self, name: str) -> Tensor:
        """This rank's weight as others get it."""
        weight, delta = self._weights[name].detach(), self._deltas.get(name)
        return weight if delta is None else (weight.float() + delta()).to(weight.dtype)

    def _shared_by_experts(self, placed: Placed) -> Sequence[Tensor]:
        """An expert's whole tensors, from the expert rank that holds them to all."""
        layout = self._layout
        if layout.ep_size == 1:
            return self._merged(placed)
        if placed.owner == layout.ep_rank:
            wholes = [whole.contiguous() for whole in self._merged(placed)]
        else:
            like = self._weights[placed.name]
            wholes = [torch.empty(t.shape, dtype=like.dtype, device=like.device) for t in placed.row.hf]
        for whole in wholes:
            dist.broadcast(whole, dist.get_global_rank(layout.ep_group, placed.owner), group=layout.ep_group)
        return wholes

    def _check_covered(self) -> None:
        covered = {placed.name for placed in self._placed} | ({self._tied_copy} if self._has_tied_copy else set())
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
