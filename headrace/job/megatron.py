"""Megatron's arguments under its own names: every field of its configs, typed, and its trainer's additional flags.

Architecture is never needed, because the checkpoint's config.json has it. Architecture flags must agree with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,  # the types in megatron_fields.json
    Annotated,
    Any,
    Literal,
    Self,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from headrace.errors import ConfigError
from headrace.job.names import MEGATRON, reason_of_each
from headrace.job.schema.section import (
    FromJson,  # noqa: F401  # so is this
    NonNegative,
    Positive,
    Rate,
    Section,
    literal,
)

# Every field of Megatron-core's configs, from megatron_fields.json, which tools/megatron_fields.py writes.

_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("megatron_fields.json").read_text(encoding="utf-8"))
_FIELDS: Mapping[str, Mapping[str, Any]] = _TABLE["fields"]

VERSIONS: tuple[str, ...] = tuple(_TABLE["versions"])
"""The minor versions that these fields are from."""

ONLY_IN: Mapping[str, tuple[str, ...]] = {
    name: tuple(field["only_in"]) for name, field in _FIELDS.items() if "only_in" in field
}
"""Fields that not all of them have."""

OBJECTS = frozenset(name for name, field in _FIELDS.items() if field["type"] is None)
"""Fields that are Python objects, so that no flag can give them."""


def _annotation(field: Mapping[str, Any]) -> str:
    kind = field["type"] or "str"  # an object is refused by its name, whatever is given
    return f"Annotated[{kind}, FromJson] | None" if " | " in kind else f"{kind} | None"


def _default(field: Mapping[str, Any]) -> Any:
    return Field(None, description=f"{'; '.join(field['of'])}: {field['default']}.")


if TYPE_CHECKING:

    class MegatronFields(Section):
        # Those that headrace's own code reads.
        account_for_embedding_in_pipeline_split: bool | None = None
        account_for_loss_in_pipeline_split: bool | None = None
        moe_router_fusion: bool | None = None
        moe_router_load_balancing_type: str | tuple[str, ...] | None = None
        num_layers_in_first_pipeline_stage: int | None = None
        num_layers_in_last_pipeline_stage: int | None = None
        pipeline_model_parallel_layout: str | tuple[str, ...] | None = None
        recompute_granularity: Literal["full", "selective"] | None = None

else:
    MegatronFields = create_model(
        "MegatronFields",
        __base__=Section,
        __module__=__name__,
        __doc__="Megatron-core's fields. None means that nobody set it: Megatron's own default holds.",
        **{name: (_annotation(field), _default(field)) for name, field in _FIELDS.items()},
    )


_TERM = re.compile(r"\[([0-9](?:,[0-9])*)\](?:\*([0-9]{1,3}))?")
_MAX_CHARACTERS = 4096


def _from_text(value: Any) -> Any:
    """Adds repeated lists up to one list; any other value is left to the field's type."""
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return value
    terms = [_TERM.fullmatch(term) for term in value.replace(" ", "").split("+")]
    layers: list[int] = []
    for term in terms:
        if term is None:
            return literal(value)
        layers += [int(digit) for digit in term[1].split(",")] * int(term[2] or 1)
    return layers


LayerPattern = BeforeValidator(_from_text)


RESERVED: Mapping[str, str] = {
    **reason_of_each(MEGATRON["reserved"]),
    **dict.fromkeys(sorted(OBJECTS), "it is a Python object, which no flag can give"),
}
"""What headrace decides, and why."""

ARCHITECTURAL = frozenset[str](MEGATRON["architectural"])
GPU_ONLY = frozenset[str](MEGATRON["gpu_only"])
OPTIMIZER_ON_GPU = frozenset[str](MEGATRON["optimizer_on_gpu"])


def _none(dropout: float) -> float:
    if dropout:
        raise ValueError("should be 0: a policy's log-probs must be the same in every pass")
    return dropout


NoDropout = Annotated[float, AfterValidator(_none)]


class ArchitectureArgs(MegatronFields):
    """Architecture flags of existing scripts that Megatron's configs do not have, or name otherwise.

    Each must equal the checkpoint's value, as those of its configs must.
    """

    max_position_embeddings: Positive | None = None
    """Longest sequence."""
    vocab_size: Positive | None = None
    """Rows of the embedding."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    """Epsilon of the norms."""
    swiglu: bool | None = None
    """Gated SiLU in the MLP."""
    untie_embeddings_and_output_weights: bool | None = None
    """The output layer has its own weights, not those of the embedding."""
    position_embedding_type: Literal["rope"] | None = None
    """How positions are known."""
    no_position_embedding: bool | None = None
    """No learned positions: they are rotary."""
    disable_bias_linear: bool | None = None
    """No biases in linear layers."""
    seq_length: Positive | None = None
    """Longest sequence; at most max_position_embeddings."""
    tokenizer_type: Literal["HuggingFaceTokenizer"] | None = None
    """The checkpoint's own."""
    group_query_attention: bool | None = None
    """Fewer key/value heads than query heads."""
    use_rotary_position_embeddings: bool | None = None
    """Positions are rotary."""
    use_rope_scaling: bool | None = None
    """Llama 3's stretched rotary frequencies."""
    post_self_attn_layernorm: bool | None = None
    """A norm behind attention too."""
    post_mlp_layernorm: bool | None = None
    """A norm behind the MLP too."""
    moe_layer_freq: Annotated[int | tuple[int, ...], LayerPattern] | None = None
    """Which layers have experts: 1, [0,1,1] or [0]*1+[1]*45."""
    spec: tuple[str, ...] = ()
    """Module and function of slime's model: must be the checkpoint's."""
    train_backend: Literal["megatron"] | None = None
    """The trainer's only one."""


class MegatronArgs(ArchitectureArgs):
    """All Megatron flags; unknown ones are errors. None stands for Megatron's own default."""

    tensor_model_parallel_size: Positive = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Positive = 1
    """Stages of consecutive layers."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Virtual stages of a pipeline rank, which take turns; absent: its layers are one stage."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """The same by the number of layers in each."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share out the experts of a layer."""
    expert_tensor_parallel_size: Positive | None = None
    """Ranks that share each expert; absent: tensor_model_parallel_size."""
    context_parallel_size: Positive = 1
    """Ranks that share a sequence: each has a part of its positions."""
    sequence_parallel: bool = False
    """Share activations over tensor ranks."""
    use_distributed_optimizer: bool = False
    """Optimizer states are shared out over data ranks."""
    bf16: bool = False
    """Weights and activations in bfloat16, fp32 master weights."""
    recompute_activations: bool = False
    """Recompute attention in the backward pass."""
    attention_dropout: NoDropout = 0.0
    """Must be 0."""
    hidden_dropout: NoDropout = 0.0
    """Must be 0."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """What updates the weights."""
    lr: Rate = 1e-6
    """Highest learning rate."""
    min_lr: Rate = 0.0
    """Lowest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How it falls."""
    lr_decay_iters: Positive | None = None
    """Optimizer steps of the decay; absent: all."""
    lr_warmup_iters: NonNegative = 0
    """Optimizer steps of the warm-up."""
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The same as a share of the decay's steps."""
    init_lr: Rate = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = None
    """How a WSD schedule falls at its end."""
    wsd_decay_steps: Positive | None = None
    """Optimizer steps of that end."""
    weight_decay: Rate = 0.01
    """Decoupled weight decay."""
    start_wd: Rate | None = None
    """Weight decay at the start; absent: weight_decay."""
    end_wd: Rate | None = None
    """Weight decay at the end; absent: weight_decay."""
    wd_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes between them."""
    wd_incr_steps: Positive | None = None
    """Optimizer steps between them; absent: all."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Adam's epsilon."""
    clip_grad: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Largest gradient norm; 0: no clipping."""
    grad_reduce_in_fp32: bool = True
    """Gradients are summed over data ranks in float32."""
    check_for_nan_in_grad: bool = True
    """A gradient that is not a number ends the run."""

    @field_validator(*RESERVED, mode="before")
    @classmethod
    def _not_headraces_own(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        raise ValueError(f"{info.field_name} cannot be set by a job: {RESERVED[info.field_name]}: leave it out")

    @model_validator(mode="after")
    def _optimizer(self) -> Self:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "recompute_activations means recompute_granularity selective, which is set to full: leave one out"
            )
        if self.optimizer != "adam" and self.use_distributed_optimizer:
            raise ConfigError(
                f"optimizer {self.optimizer} with use_distributed_optimizer: Megatron-core distributes only Adam: "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _schedules(self) -> Self:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ConfigError(
                f"lr_warmup_iters {self.lr_warmup_iters} and lr_warmup_fraction {self.lr_warmup_fraction:g} set the "
                "same thing: leave one out"
            )
        start, end = (self.weight_decay if wd is None else wd for wd in (self.start_wd, self.end_wd))
        if start != end and self.wd_incr_style == "constant":
            raise ConfigError(
                f"start_wd {start} and end_wd {end} differ, and wd_incr_style is constant: make it linear or cosine"
            )
        if self.wd_incr_steps is not None and self.wd_incr_style == "constant":
            raise ConfigError("wd_incr_steps has no effect with wd_incr_style constant: leave it out")
        for name, value in (("wsd_decay_steps", self.wsd_decay_steps), ("lr_wsd_decay_style", self.lr_wsd_decay_style)):
            if (value is None) == (self.lr_decay_style == "WSD"):
                raise ConfigError(f"lr_decay_style is {self.lr_decay_style} and {name} is {value}: set both or neither")
        return self

    def given(self, names: frozenset[str]) -> dict[str, Any]:
        """The values of those `names` that the job sets."""
        return {name: getattr(self, name) for name in sorted(names & self.model_fields_set)}

    @property
    def dtype(self) -> str:
        """Of the weights, in the trainer and as they are published."""
        return "bfloat16" if self.bf16 else "float32"

    def needs_gpu(self) -> list[str]:
        """The flags that need a GPU, as they would be typed."""
        flags = []
        for name, value in self.given(GPU_ONLY).items():
            if value:
                flag = f"--{name.replace('_', '-')}"
                flags.append(flag if value is True else f"{flag} {value}")
        return flags


DESCRIBED = frozenset(ArchitectureArgs.__annotations__) | frozenset(MegatronArgs.__annotations__)
"""Arguments that headrace says something about; the others are Megatron-core's alone."""


def megatron(arguments: Mapping[str, Any]) -> MegatronArgs:
    return MegatronArgs.model_validate(arguments)
