"""LoRA: adapters of this rank's stages, their folder as peft reads and writes it, and the policy's weights with them.

An adapter belongs to one weight of Megatron's linear layers, which may be several layers of Hugging Face's. By kind of
layer, tensor ranks hold and exchange:

    layer                     A           B         the middle, A·x
    column-parallel           whole       own rows  is the same everywhere, its gradient is summed; or is gathered
    row-parallel              own columns whole     is summed, or summed and scattered
    whole on every rank       whole       whole     needs nothing
    experts, and shared ones  as above    as above  needs nothing: the tokens' dispatcher gathers and sums around the
    that overlap with them                          layer

The second choice is that of sequence parallelism, in which Megatron sums the gradients of whole matrices over ranks.
Transformer Engine's layers have the same kinds. Where it normalizes within a layer, the layer returns what it has
normalized. A grouped layer has the weights of several experts.

Stages are frozen, and base weights keep their names and their values. Trained, saved and restored are the adapters'
parameters; a weight that leaves for the engines or an export has them added. Adapters start as peft makes them: B is
0, so that the model is what it was.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.job.model import adapted_layers, adapted_names, last_word, layer_name
from headrace.job.schema.training import LoraSection
from headrace.models.architecture import Architecture
from headrace.models.family import (
    FusedGateUp,
    GateUp,
    HfTensor,
    QueryKeyValue,
    Replicated,
    Row,
    Sections,
    Sharding,
    Split,
    Transposed,
    TransposedGateUp,
)
from headrace.publication import TensorSpec
from services.trainer.collective_io import write_tensors
from services.trainer.durable import new_folder
from services.trainer.hugging_face.convert import Converter, Placed, gathered
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.hugging_face.shards import ModelShard, cut, merge
from services.trainer.megatron.configs import mark_like_expert, mark_sequence_parallel, mark_tensor_parallel
from services.trainer.megatron.parallel import Layout


@dataclass(frozen=True, slots=True)
class SlicedDropout:
    """Draws for the whole tensor and takes the rank's slice: what is dropped does not depend on the layout.

    Tensor ranks draw the same numbers, for their generators have the same seed.
    """

    share: float
    """Of the elements that are dropped"""
    dim: int | None
    """The dimension that tensor ranks divide; None: all have the whole tensor."""
    rank: int
    size: int

    def __call__(self, values: Tensor) -> Tensor:
        """The rest is scaled up, so that the expected value stays."""
        if not self.share:
            return values
        shape = list(values.shape)
        if self.dim is not None:
            shape[self.dim] *= self.size
        is_kept = torch.rand(shape, device=values.device) >= self.share
        if self.dim is not None:
            is_kept = is_kept.chunk(self.size, self.dim)[self.rank]
        return values * is_kept.to(values.dtype) / (1.0 - self.share)


@dataclass(frozen=True, slots=True)
class Pair:
    """Whole matrices of one Hugging Face layer."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""


class LowRank(nn.Module):
    """This tensor rank's shards of a pair, under peft's names."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(b)

    def delta(self) -> Tensor:
        """[in, out] in float32: what it adds to the transposed weight, before it is scaled."""
        product: Tensor = (self.lora_B.detach().float() @ self.lora_A.detach().float()).T
        return product


def pair_shapes(weight: HfTensor, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    size_out, size_in = weight.shape
    return (rank, size_in), (size_out, rank)


Exchange = Callable[[Tensor], Tensor]


class Adapter(nn.Module):
    """`parts` are those of the layer's Hugging Face tensors, in the table's order; None for one without an adapter.

    `sizes` are the outputs of each part on this rank.
    """

    def __init__(
        self,
        sharding: Sharding,
        parts: Sequence[LowRank | None],
        sizes: Sequence[int],
        scale: float,
        dropout: SlicedDropout,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part or nn.Identity() for part in parts)
        self._sharding = sharding
        self._sizes = sizes
        self.scale = scale
        self._dropout = dropout
        self._exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        """Takes the layer's input and returns what is added to its output."""
        return self._arranged([self._output(part, x) for part in self.parts])

    def delta(self) -> Tensor:
        """Returns what is added to this rank's shard of the weight, in its shape and in float32."""
        return self._arranged([part.delta() if isinstance(part, LowRank) else None for part in self.parts]).T

    def _output(self, part: nn.Module, x: Tensor) -> Tensor | None:
        if not isinstance(part, LowRank):
            return None
        x = self._dropout(x) if self.training else x
        middle = self._exchange(nn.functional.linear(x, part.lora_A))
        return nn.functional.linear(middle, part.lora_B)

    def _arranged(self, outputs: Sequence[Tensor | None]) -> Tensor:
        """[…, out of all parts] in Megatron's order, scaled; 0 where a part has no adapter."""
        like = next(output for output in outputs if output is not None)
        whole = [
            like.new_zeros(*like.shape[:-1], size) if output is None else output
            for output, size in zip(outputs, self._sizes, strict=True)
        ]
        return arranged(self._sharding, whole) * self.scale


def arranged(sharding: Sharding, parts: Sequence[Tensor]) -> Tensor:
    """Outputs of Hugging Face layers in the order in which Megatron's layer has them; the last dimension is theirs."""
    match sharding:
        case QueryKeyValue(_, heads_per_group, head_size, has_gates):
            groups = parts[1].shape[-1] // head_size
            query, *others = (part.unflatten(-1, (groups, -1)) for part in parts)
            if has_gates:
                query = query.unflatten(-1, (heads_per_group, 2, head_size)).transpose(-3, -2).flatten(-3)
            return torch.cat([query, *others], dim=-1).flatten(-2)
        case GateUp() | Sections():
            return torch.cat(list(parts), dim=-1)
        case TransposedGateUp():
            return torch.cat([parts[0][..., ::2], parts[0][..., 1::2]], dim=-1)
        case _:
            return parts[0]


class ExpertAdapters(nn.ModuleList):
    """The adapters of a grouped linear layer, in the order of its experts."""

    def forward(self, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
        """Takes what the layer takes: the tokens of all its experts, one expert's behind the other's."""
        return torch.cat([adapter(own) for adapter, own in zip(self, tokens.split(list(sizes)), strict=True)])


def is_row_parallel(sharding: Sharding) -> bool:
    return isinstance(sharding, Transposed) or (isinstance(sharding, Split) and sharding.dim == 1)


def pair_shardings(sharding: Sharding, part: int) -> tuple[Sharding, Sharding]:
    match sharding:
        case Replicated():
            return Replicated(), Replicated()
        case Split(1) | Transposed():
            return Split(1), Replicated()
        case FusedGateUp():
            return Replicated(), sharding
        case Sections(sizes, times):
            return Replicated(), Sections((sizes[part],), times)
        case _:
            return Replicated(), Split(0)


def exchange_of(sharding: Sharding, *, sequence_parallel: bool) -> Exchange:
    exchange: Exchange
    if isinstance(sharding, Replicated):
        exchange = _unchanged
    elif is_row_parallel(sharding):
        scatter, reduce = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        exchange = scatter if sequence_parallel else reduce
    elif sequence_parallel:
        exchange = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True)
    else:
        exchange = copy_to_tensor_model_parallel_region
    return exchange


def _unchanged(middle: Tensor) -> Tensor:
    return middle


@dataclass(frozen=True, slots=True)
class InitialPairs:
    """Random numbers of each layer depend on the seed and its name alone: not on the layout."""

    rank: int
    init: str
    """kaiming or gaussian"""
    seed: int

    def __call__(self, weight: HfTensor) -> Pair:
        """Float32 matrices of the layer that has this weight."""
        shape_a, shape_b = pair_shapes(weight, self.rank)
        a, random = torch.empty(shape_a), torch.Generator().manual_seed(self._seed_of(weight.key))
        if self.init == "gaussian":
            torch.nn.init.normal_(a, std=1 / self.rank, generator=random)
        else:
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=random)
        return Pair(a, torch.zeros(shape_b))

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LAYERS, _BESIDE_A_TOWER = ("model.layers.", "language_model.model.layers."), "model.language_model.layers."
_TOWERS = ("visual.", "vision_tower.")
_WITHOUT_TOWERS = r".*(visual|vision_tower)\..*"
"""peft's pattern of modules without adapters"""
_LARGEST_CONFIG = 1 << 20
_SHOWN = 3
_OTHER_FORMS = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("fan_in_fan_out", "layer_replication", "lora_bias", "trainable_token_indices"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "velora_config"),
)
"""Settings of peft that change what an adapter is; here all of them are off."""
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ change them."""


class PeftFolder:
    """Adapters of the job's rank and layers. Raises ConfigError for any others."""

    def __init__(self, folder: Path, architecture: Architecture, lora: LoraSection) -> None:
        self._folder = folder
        self._architecture = architecture
        self._rank = lora.lora_rank
        self._words = lora.lora_target_modules
        config = {"use_rslora": False} | self._config()
        self._require(config, "peft_type", "LORA", "")
        self._require(config, "bias", "none", "")
        self._require(config, "r", lora.lora_rank, ": pass --lora-rank")
        self._require(config, "lora_alpha", lora.lora_alpha, ": pass --lora-alpha")
        self._require(config, "use_rslora", lora.lora_use_rslora, ": pass --lora-use-rslora, or leave it out")
        for name in _OTHER_FORMS:
            if config.get(name):
                raise ConfigError(f"lora_load {folder}: {name} is set in {CONFIG}: headrace has plain LoRA alone")
        if (initial := config.get("init_lora_weights")) not in _INITIAL_WEIGHTS:
            raise ConfigError(
                f"lora_load {folder}: init_lora_weights is {initial!r} in {CONFIG}, so the adapter belongs to a base "
                "that peft has changed: convert it to plain LoRA first (path_initial_model_for_weight_conversion of "
                "peft's save_pretrained)",
                field="lora_load",
            )
        self._file = self._opened()
        layers = adapted_layers(architecture, self._words)
        self._require_names({name for tensor in layers for name in peft_names(tensor, architecture, self._words)})

    def __call__(self, weight: HfTensor) -> Pair:
        assert self._rank is not None
        shapes = pair_shapes(weight, self._rank)
        names = peft_names(weight, self._architecture, self._words)
        a, b = (self._file.get_tensor(name) for name in names)
        if weight.slot is not None and a.shape[0] == b.shape[-1] == self._rank * weight.slots:
            a, b = a.chunk(weight.slots)[weight.slot], b.unflatten(-1, (-1, weight.slots))[..., weight.slot]
        for name, tensor, shape in zip(names, (a, b), shapes, strict=True):
            if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ConfigError(
                    f"lora_load {self._folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, and must be "
                    f"finite numbers of shape {list(shape)}",
                    field="lora_load",
                )
        return Pair(a.float(), b.float())

    def _config(self) -> dict[str, Any]:
        path = self._folder / CONFIG
        try:
            if path.stat().st_size > _LARGEST_CONFIG:
                raise ValueError("it is too large")
            found = json.loads(path.read_text())
            if not isinstance(found, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"lora_load {path} cannot be read: {error}", field="lora_load") from error
        return found

    def _require(self, config: Mapping[str, Any], name: str, wanted: object, way_out: str) -> None:
        if config.get(name) != wanted:
            raise ConfigError(
                f"lora_load {self._folder}: {name} is {config.get(name)} there and {wanted} here{way_out}",
                field="lora_load",
            )

    def _require_names(self, expected: set[str]) -> None:
        found = set(self._file.keys())
        lacking, extra = sorted(expected - found), sorted(found - expected)
        if lacking or extra:
            raise ConfigError(
                f"lora_load {self._folder} has adapters of other layers: it lacks {len(lacking)} ({lacking[:_SHOWN]}) "
                f"and has {len(extra)} more ({extra[:_SHOWN]}): pass its --lora-target-modules",
                field="lora_load",
            )

    def _opened(self) -> Any:
        try:
            return safe_open(str(self._folder / WEIGHTS), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"lora_load {self._folder / WEIGHTS} cannot be read: {error}", field="lora_load"
            ) from error


def peft_names(weight: HfTensor, architecture: Architecture, words: Sequence[str]) -> tuple[str, str]:
    """Returns the names that A and B have in peft's file, which for experts in one tensor are those of all experts.

    There peft wraps their module for one tensor after the other.
    """
    layer = _peft_name(layer_name(weight.name), architecture)
    if weight.slot is not None:
        layer, _, word = layer.rpartition(".")
        layer += ".base_layer" * (word == "gate_up_proj" and "down_proj" in words)
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _peft_name(key: str, architecture: Architecture) -> str:
    """Has the name of transformers' module, which differs from the checkpoint's for a decoder beside a vision tower."""
    alone, beside = _LAYERS
    layers = alone if architecture.vision is not None else beside
    return _PREFIX + (_BESIDE_A_TOWER + key.removeprefix(layers) if key.startswith(layers) else key)


def write_peft(
    folder: Path, base: Path, architecture: Architecture, lora: LoraSection, matrices: Mapping[str, Tensor]
) -> None:
    """Writes whole matrices, by their keys in a checkpoint. Raises AlreadyExists for a folder in use."""
    tensors: dict[str, Tensor] = {}
    layers = adapted_layers(architecture, lora.lora_target_modules)
    for weight in layers:
        a, b = (matrices[f"{layer_name(weight.key)}.{part}.weight"].detach().cpu() for part in ("lora_A", "lora_B"))
        name_a, name_b = peft_names(weight, architecture, lora.lora_target_modules)
        if weight.slot is None:
            tensors |= {name_a: a.contiguous(), name_b: b.contiguous()}
            continue
        all_a = tensors.setdefault(name_a, a.new_empty(len(a) * weight.slots, *a.shape[1:]))
        all_b = tensors.setdefault(name_b, b.new_empty(*b.shape[:-1], b.shape[-1] * weight.slots))
        all_a.chunk(weight.slots)[weight.slot].copy_(a)
        all_b.unflatten(-1, (-1, weight.slots))[..., weight.slot] = b
    config = _peft_config(base, lora, layers)
    without = {"exclude_modules": _WITHOUT_TOWERS} if any(name.endswith(_TOWERS) for name in architecture.kept) else {}
    with new_folder(folder) as draft:
        write_tensors(draft / WEIGHTS, tensors, {"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(config | without, indent=2))


def _peft_config(base: Path, lora: LoraSection, layers: Sequence[HfTensor]) -> dict[str, Any]:
    stacks = sorted({f"mlp.experts.{last_word(each.name)}" for each in layers if each.slot is not None})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0 if stacks else lora.lora_dropout,  # peft has none for experts in one tensor
        "use_rslora": lora.lora_use_rslora,
        "target_modules": sorted({last_word(each.name) for each in layers if each.slot is None}),
        **({"target_parameters": stacks} if stacks else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


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
    served: Mapping[str, Any]
    """The adapter_config.json with which engines serve them."""
    peft_name: Callable[[str], str]
    """A shard's key → the name in peft's file."""

    def deltas(self) -> dict[str, Callable[[], Tensor]]:
        return {name: adapter.delta for name, adapter in self.by_weight.items()}

    def weights(self) -> dict[str, Tensor]:
        return {shard.key: shard.parameter for shard in self.shards}

    def wholes(self, layout: Layout) -> dict[str, Tensor]:
        """Collective over tensor ranks: this stage's whole matrices by their names in peft's file; none of experts."""
        return {self.peft_name(shard.key): whole_of(shard, shard.parameter.detach(), layout) for shard in self.shards}

    def whole_specs(self) -> list[TensorSpec]:
        """What `wholes` returns. Moves nothing."""
        return [
            TensorSpec(
                self.peft_name(shard.key),
                shard.whole_shape,
                str(shard.parameter.dtype).removeprefix("torch."),
            )
            for shard in self.shards
        ]

    def fold_into(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, adapter in self.by_weight.items():
                weights[name].copy_(weights[name].float() + adapter.delta())

    def switch_off(self) -> None:
        """Makes every B 0: the model is its base alone."""
        with torch.no_grad():
            for key, parameter in self.weights().items():
                if key.endswith(".lora_B.weight"):
                    parameter.zero_()


def whole_of(shard: ModelShard, own: Tensor, layout: Layout) -> Tensor:
    """Collective over tensor ranks: all ranks' `own`, which lie as the shard's parameter does. None of experts."""
    return merge(shard.sharding, gathered(own, layout.tp_group, shard.num_shards))[0].contiguous()


def attach(model: RankModel, architecture: Architecture, layout: Layout, lora: LoraSection, seed: int) -> Adapters:
    """Freezes the stages and gives their target layers adapters; before gradients get their buffers.

    Raises ConfigError for a lora_load that does not fit.
    """
    layers = adapted_layers(architecture, lora.lora_target_modules)
    targets = {tensor.key: tensor for tensor in layers}
    for stage in model.stages:
        stage.requires_grad_(False)
        if stage.pre_process:
            stage.embedding.register_forward_hook(_needs_gradient)
    assert lora.lora_rank is not None
    start: Start = InitialPairs(lora.lora_rank, lora.lora_init, seed)
    if lora.lora_load is not None:
        start = PeftFolder(lora.lora_load, architecture, lora)
    builder = _Builder(model.config, layout.device, lora, targets, start)
    by_weight: dict[str, Adapter] = {}
    shards: list[ModelShard] = []
    for held in model.converter.held():
        if any(tensor.key in targets for tensor in held.row.hf):
            adapter, own = builder.build(held)
            number, _, name = held.name.partition(".")
            _put(adapter, model.stages[int(number)].get_submodule(name.rpartition(".")[0]), held)
            by_weight[held.name] = adapter
            shards += own
    # Engines multiply by alpha / R, whatever use_rslora says.
    alpha = scale_of(lora) * lora.lora_rank
    served = _peft_config(Path(), lora, layers) | {"lora_alpha": alpha, "use_rslora": False}
    targets_by_name = adapted_names(architecture, lora.lora_target_modules)
    facts = {"rank": lora.lora_rank, "alpha": lora.lora_alpha, "target_modules": targets_by_name}
    facts |= {"use_rslora": True} if lora.lora_use_rslora else {}
    return Adapters(by_weight, shards, facts, served, partial(_peft_name, architecture=architecture))


@dataclass(frozen=True, slots=True)
class _Builder:
    config: TransformerConfig
    device: torch.device
    lora: LoraSection
    targets: Mapping[str, HfTensor]
    """By their keys, out × in."""
    start: Start

    def build(self, held: Placed) -> tuple[Adapter, list[ModelShard]]:
        """The adapter of one weight, and its parameters' places."""
        row, sharding = held.row, held.sharding
        wanted = [self.targets.get(tensor.key) for tensor in row.hf]
        parts = [self._part(weight, held, number) if weight else None for number, weight in enumerate(wanted)]
        communicates, divided = self._communicates(row), None
        if is_row_parallel(sharding):
            divided = -1
        elif communicates and self.config.sequence_parallel:
            divided = 0
        adapter = Adapter(
            sharding,
            parts,
            [
                (weight or tensor).shape[0] // (1 if isinstance(sharding, Replicated) else held.size)
                for weight, tensor in zip(wanted, row.hf, strict=True)
            ],
            scale_of(self.lora),
            SlicedDropout(self.lora.lora_dropout, divided, held.rank, held.size),
            exchange_of(sharding, sequence_parallel=self.config.sequence_parallel) if communicates else _unchanged,
        )
        return adapter, [
            shard for number, part in enumerate(parts) if part for shard in self._shards(part, held, number)
        ]

    def _communicates(self, row: Row) -> bool:
        """False for a layer around which others gather its input and sum its output."""
        overlaps = self.config.moe_shared_expert_overlap and ".shared_experts." in row.megatron
        return row.expert is None and not overlaps

    def _part(self, weight: HfTensor, held: Placed, number: int) -> LowRank:
        pair = self.start(weight)
        of_a, of_b = pair_shardings(held.sharding, number)
        a, b = (
            cut(how, [whole], held.rank, held.size).clone().to(device=self.device, dtype=held.weight.dtype)
            for how, whole in ((of_a, pair.a), (of_b, pair.b))
        )
        part = LowRank(a, b)
        for how, parameter in ((of_a, part.lora_A), (of_b, part.lora_B)):
            is_copied = isinstance(how, Replicated) and held.size > 1
            mark_tensor_parallel(parameter, not is_copied)
            mark_sequence_parallel(parameter, is_copied and self.config.sequence_parallel)
            mark_like_expert(parameter, held.weight)
        return part

    def _shards(self, part: LowRank, held: Placed, number: int) -> Iterator[ModelShard]:
        layer = layer_name(held.row.hf[number].key)
        of_a, of_b = pair_shardings(held.sharding, number)
        for name, parameter, how in (("lora_A", part.lora_A, of_a), ("lora_B", part.lora_B, of_b)):
            yield held.shard(f"{layer}.{name}.weight", parameter, how)


def scale_of(lora: LoraSection) -> float:
    assert lora.lora_rank is not None
    return lora.lora_alpha / (math.sqrt(lora.lora_rank) if lora.lora_use_rslora else lora.lora_rank)


def _put(adapter: Adapter, linear: Any, held: Placed) -> None:
    """Adds it to its layer. A grouped one has weight0, weight1, …, of which the first comes first."""
    if held.name.endswith(".weight"):
        linear.add_module(_NAME, adapter)
    elif hasattr(linear, _NAME):
        linear.lora.append(adapter)
        return
    else:
        linear.add_module(_NAME, ExpertAdapters([adapter]))
    if hasattr(linear, "layer_norm_weight"):
        linear.return_layernorm_output = True
        linear.register_forward_hook(_add_behind_norm)
    else:
        linear.register_forward_hook(_add)


Output = tuple[Tensor, Tensor | None]


def _add(linear: Any, inputs: tuple[Any, ...], output: Output) -> Output:
    """A hook behind a linear layer of Megatron, whose output comes with a bias."""
    values, bias = output
    return values + linear.lora(*inputs), bias


def _add_behind_norm(linear: Any, _: tuple[Any, ...], output: Any) -> Output:
    """A hook behind Transformer Engine's layer with a norm, which it asks for the normalized input."""
    if linear.te_return_bias:
        values, bias, normed = output
    else:
        (values, normed), bias = output
    return values + linear.lora(normed), bias


def _needs_gradient(_: nn.Module, __: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
    """A hook behind the frozen embedding: a layer that is recomputed gets no gradient unless its input has one."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """`named` is everything, adapters included; a copy of another policy needs no more than what changes."""

    converter: Converter
    adapters: Adapters | None
    named: Mapping[str, Tensor]

    @property
    def shards(self) -> list[ModelShard]:
        """Everything with its place in the whole model."""
        return [*self.converter.shards(), *(self.adapters.shards if self.adapters else [])]

    @property
    def changing(self) -> Mapping[str, Tensor]:
        """The adapters' parameters, or everything without adapters."""
        return self.adapters.weights() if self.adapters else self.named

    @property
    def changing_shards(self) -> Sequence[ModelShard]:
        """The same with its place in the whole model."""
        return self.adapters.shards if self.adapters else self.shards

    def become(self, folder: Path) -> None:
        """Makes the policy the folder's model, with adapters off."""
        self.converter.load(folder)
        if self.adapters:
            self.adapters.switch_off()
