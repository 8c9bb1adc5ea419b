"""All adapters of a rank: attached to its stages, which are frozen, and seen from outside.

Base weights keep their names and their values. Trained, saved and restored are the adapters' parameters; a weight that
leaves for the engines or an export has them added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.job.model.lora_targets import last_word, layer_name, lora_targets
from headrace.job.schema.lora import LoraSection
from headrace.models.architecture import Architecture
from headrace.models.registry import table
from headrace.models.rows import HfTensor, Replicated, Sharding
from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.hugging_face.placement import Placed, placed_rows
from services.trainer.hugging_face.shards import cut
from services.trainer.megatron.marks import mark_sequence_parallel, mark_tensor_parallel
from services.trainer.megatron.parallel import Layout
from services.trainer.model.lora.adapter import Adapter, exchange_of, is_row_parallel, pair_shardings
from services.trainer.model.lora.dropout import SlicedDropout
from services.trainer.model.lora.initial import InitialPairs
from services.trainer.model.lora.low_rank import LowRank, Pair
from services.trainer.model.lora.peft_folder import PeftFolder

Start = Callable[[HfTensor], Pair]
_NAME = "lora"
"""What an adapter is called below its linear layer."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """This rank's, by the name of the weight that each is added to (`weights_of`)."""

    by_weight: Mapping[str, Adapter]
    shards: Sequence[ModelShard]
    """Every A and B with its place in the whole model; the keys end with lora_A.weight and lora_B.weight."""
    facts: Mapping[str, Any]
    """What a checkpoint of them says, as JSON has it."""

    def deltas(self) -> dict[str, Callable[[], Tensor]]:
        """Returns what is added to each weight that leaves, in float32."""
        return {name: adapter.delta for name, adapter in self.by_weight.items()}

    def weights(self) -> dict[str, Tensor]:
        """The parameters by their keys in a checkpoint."""
        return {shard.key: shard.parameter for shard in self.shards}

    def fold_into(self, weights: Mapping[str, Tensor]) -> None:
        """Adds the adapters to the weights themselves, for good."""
        with torch.no_grad():
            for name, adapter in self.by_weight.items():
                weights[name].copy_(weights[name].float() + adapter.delta())

    def switch_off(self) -> None:
        """Makes every B 0: the model is its base alone."""
        with torch.no_grad():
            for key, parameter in self.weights().items():
                if key.endswith(".lora_B.weight"):
                    parameter.zero_()


def attach(
    stages: Sequence[GPTModel],
    config: TransformerConfig,
    architecture: Architecture,
    layout: Layout,
    lora: LoraSection,
    seed: int,
) -> Adapters:
    """Freezes the stages and gives their target layers adapters; before gradients get their buffers.

    Raises ConfigError for layers that cannot be adapted, and for a lora_load that does not fit.
    """
    targets = lora_targets(architecture, lora.lora_target_modules)
    for stage in stages:
        stage.requires_grad_(False)
        if stage.pre_process:
            stage.embedding.register_forward_hook(_needs_gradient)
    rows = [placed for placed in placed_rows(architecture, layout, stages) if _is_target(placed, targets)]
    start = _start(lora, targets, architecture, seed)
    builder = _Builder(config, layout, lora, targets, start)
    by_weight: dict[str, Adapter] = {}
    shards: list[ModelShard] = []
    for placed in rows:
        linear = _module(stages, placed)
        adapter, own = builder.build(placed, linear)
        linear.add_module(_NAME, adapter)
        linear.register_forward_hook(_add)
        by_weight[placed.name] = adapter
        shards += own
    return Adapters(by_weight, shards, _facts(lora, targets))


@dataclass(frozen=True, slots=True)
class _Builder:
    config: TransformerConfig
    layout: Layout
    lora: LoraSection
    targets: frozenset[str]
    start: Start

    def build(self, placed: Placed, linear: nn.Module) -> tuple[Adapter, list[ModelShard]]:
        """The adapter of one linear layer, and its parameters' places."""
        row, size = placed.row, self.layout.tp_size
        parts = [self._part(t, row.sharding) if last_word(t.name) in self.targets else None for t in row.hf]
        assert self.lora.lora_rank is not None
        adapter = Adapter(
            row.sharding,
            parts,
            [t.shape[0] // size for t in row.hf],
            self.lora.lora_alpha / self.lora.lora_rank,
            SlicedDropout(self.lora.lora_dropout, self._divided(row.sharding), self.layout.tp_rank, size),
            exchange_of(row.sharding, sequence_parallel=self.config.sequence_parallel),
        )
        pairs = zip(row.hf, parts, strict=True)
        return adapter, [shard for t, part in pairs if part for shard in self._shards(t, part, row.sharding)]

    def _part(self, weight: HfTensor, sharding: Sharding) -> LowRank:
        pair, layout = self.start(weight), self.layout
        of_a, of_b = pair_shardings(sharding)
        a, b = (
            cut(how, [whole], layout.tp_rank, layout.tp_size)
            .clone()
            .to(device=layout.device, dtype=self.config.params_dtype)
            for how, whole in ((of_a, pair.a), (of_b, pair.b))
        )
        part = LowRank(a, b)
        for how, parameter in ((of_a, part.lora_A), (of_b, part.lora_B)):
            is_whole = isinstance(how, Replicated)
            mark_tensor_parallel(parameter, not is_whole)
            mark_sequence_parallel(parameter, is_whole and self.config.sequence_parallel)
        return part

    def _divided(self, sharding: Sharding) -> int | None:
        """The dimension of the layer's input [S, B, in] that tensor ranks divide."""
        if is_row_parallel(sharding):
            return -1
        return 0 if self.config.sequence_parallel else None

    def _shards(self, weight: HfTensor, part: LowRank, sharding: Sharding) -> Iterator[ModelShard]:
        layout, layer = self.layout, layer_name(weight.name)
        of_a, of_b = pair_shardings(sharding)
        for name, parameter, how in (("lora_A", part.lora_A, of_a), ("lora_B", part.lora_B, of_b)):
            is_whole = isinstance(how, Replicated)
            yield ModelShard(
                key=f"{layer}.{name}.weight",
                parameter=parameter,
                sharding=how,
                shard=0 if is_whole else layout.tp_rank,
                num_shards=1 if is_whole else layout.tp_size,
                replica=layout.dp_rank * layout.tp_size + layout.tp_rank if is_whole else layout.dp_rank,
                num_replicas=layout.dp_size * layout.tp_size if is_whole else layout.dp_size,
                speaks=layout.tp_rank == 0 or not is_whole,
            )


def _start(lora: LoraSection, targets: frozenset[str], architecture: Architecture, seed: int) -> Start:
    assert lora.lora_rank is not None
    if lora.lora_load is None:
        return InitialPairs(lora.lora_rank, lora.lora_init, seed)
    adapted = (t for t in table(architecture).tensors() if t.name.endswith(".weight") and last_word(t.name) in targets)
    return PeftFolder(lora.lora_load, lora, adapted)


def _facts(lora: LoraSection, targets: frozenset[str]) -> dict[str, Any]:
    return {"rank": lora.lora_rank, "alpha": lora.lora_alpha, "target_modules": sorted(targets)}


def _is_target(placed: Placed, targets: frozenset[str]) -> bool:
    is_weight = placed.row.megatron.endswith(".weight")
    return is_weight and any(last_word(tensor.name) in targets for tensor in placed.row.hf)


def _module(stages: Sequence[GPTModel], placed: Placed) -> Any:
    number, _, name = placed.name.partition(".")
    linear: Any = stages[int(number)].get_submodule(name.removesuffix(".weight"))
    if hasattr(linear, "layer_norm_weight"):
        raise ConfigError(
            f"lora_rank with Transformer Engine, whose {type(linear).__name__} shows nobody its input: train without "
            "Transformer Engine, or leave --lora-rank out",
            field="lora_rank",
        )
    return linear


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """A hook behind a linear layer of Megatron, whose output comes with a bias."""
    values, bias = output
    return values + linear.lora(inputs[0]), bias


def _needs_gradient(_: nn.Module, __: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
    """A hook behind the frozen embedding: a layer that is recomputed gets no gradient unless its input has one."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded
