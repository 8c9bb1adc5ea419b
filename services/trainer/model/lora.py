"""LoRA: adapters of this rank's stages, their folder as peft reads and writes it, and the policy's weights with them.

An adapter belongs to one linear layer of Megatron, which may be several layers of Hugging Face's. A column-parallel
layer has all of A on every tensor rank, and its own rows of B: the middle, A·x, is the same everywhere, and its
gradient is a sum over ranks. A row-parallel layer has its own columns of A, and all of B: the middle is a sum. With
sequence parallelism the middle is gathered, or scattered, as its input and output are.

Stages are frozen, and base weights keep their names and their values. Trained, saved and restored are the adapters'
parameters; a weight that leaves for the engines or an export has them added. Adapters start as peft makes them: B is
0, so that the model is what it was.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
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
from headrace.job.model import last_word, layer_name, lora_targets
from headrace.job.schema.training import LoraSection
from headrace.models.architecture import Architecture
from headrace.models.family import FusedGateUp, GateUp, HfTensor, QueryKeyValue, Replicated, Sharding, Split
from headrace.models.registry import table
from services.trainer.collective_io import write_tensors
from services.trainer.durable import new_folder
from services.trainer.hugging_face.convert import Converter, Placed, placed_rows
from services.trainer.hugging_face.shards import ModelShard, cut
from services.trainer.megatron.configs import mark_sequence_parallel, mark_tensor_parallel
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
    """The shapes of A and B for a layer with this weight."""
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
        self._scale = scale
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
        return arranged(self._sharding, whole) * self._scale


def arranged(sharding: Sharding, parts: Sequence[Tensor]) -> Tensor:
    """Outputs of Hugging Face layers in the order in which Megatron's layer has them; the last dimension is theirs."""
    match sharding:
        case QueryKeyValue(_, _, head_size):
            groups = parts[1].shape[-1] // head_size
            return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)
        case GateUp():
            return torch.cat(list(parts), dim=-1)
        case _:
            return parts[0]


def is_row_parallel(sharding: Sharding) -> bool:
    """True where tensor ranks divide the layer's input."""
    return isinstance(sharding, Split) and sharding.dim == 1


def pair_shardings(sharding: Sharding) -> tuple[Sharding, Sharding]:
    """Returns how tensor ranks divide A and B of a layer: one of the two is whole on each."""
    if is_row_parallel(sharding):
        return Split(1), Replicated()
    return Replicated(), sharding if isinstance(sharding, FusedGateUp) else Split(0)


def exchange_of(sharding: Sharding, *, sequence_parallel: bool) -> Exchange:
    """Returns what tensor ranks do with the middle."""
    exchange: Exchange
    if is_row_parallel(sharding):
        scatter, reduce = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        exchange = scatter if sequence_parallel else reduce
    elif sequence_parallel:
        exchange = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True)
    else:
        exchange = copy_to_tensor_model_parallel_region
    return exchange


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
        a, random = torch.empty(shape_a), torch.Generator().manual_seed(self._seed_of(weight.name))
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
_LARGEST_CONFIG = 1 << 20
_SHOWN = 3
_OTHER_FORMS = (
    *("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("fan_in_fan_out", "layer_replication", "target_parameters", "lora_bias", "trainable_token_indices"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "velora_config"),
)
"""Settings of peft that change what an adapter is; here all of them are off."""
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ change them."""


class PeftFolder:
    """Adapters of the job's rank and layers. Raises ConfigError for any others."""

    def __init__(self, folder: Path, lora: LoraSection, targets: Iterable[HfTensor]) -> None:
        self._folder = folder
        self._rank = lora.lora_rank
        config = self._config()
        self._require(config, "peft_type", "LORA", "")
        self._require(config, "bias", "none", "")
        self._require(config, "r", lora.lora_rank, ": pass --lora-rank")
        self._require(config, "lora_alpha", lora.lora_alpha, ": pass --lora-alpha")
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
        self._require_names({name for tensor in targets for name in peft_names(tensor.name)})

    def __call__(self, weight: HfTensor) -> Pair:
        """The matrices of the layer that has this weight."""
        assert self._rank is not None
        shapes = pair_shapes(weight, self._rank)
        with self._opened() as file:
            a, b = (file.get_tensor(name) for name in peft_names(weight.name))
        for name, tensor, shape in zip(peft_names(weight.name), (a, b), shapes, strict=True):
            if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ConfigError(
                    f"lora_load {self._folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, and must be "
                    f"finite numbers of shape {list(shape)}",
                    field="lora_load",
                )
        return Pair(a.float(), b.float())

    def _config(self) -> Mapping[str, Any]:
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
        with self._opened() as file:
            found = set(file.keys())
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


def peft_names(weight: str) -> tuple[str, str]:
    """Returns the names that A and B have in peft's file."""
    layer = _PREFIX + layer_name(weight)
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def write_peft(
    folder: Path, base: Path, lora: LoraSection, targets: Iterable[str], matrices: Mapping[str, Tensor]
) -> None:
    """Writes whole matrices, by their keys in a checkpoint. Raises AlreadyExists for a folder in use."""
    tensors = {_PREFIX + key: tensor.detach().cpu().contiguous() for key, tensor in matrices.items()}
    with new_folder(folder) as draft:
        write_tensors(draft / WEIGHTS, tensors, {"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(_peft_config(base, lora, targets), indent=2))


def _peft_config(base: Path, lora: LoraSection, targets: Iterable[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(targets),
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
            yield ModelShard.of(
                f"{layer}.{name}.weight",
                parameter,
                how,
                rank=layout.tp_rank,
                size=layout.tp_size,
                data_rank=layout.dp_rank,
                data_size=layout.dp_size,
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
