"""A checkpoint's architecture as this rank's part of a Megatron-core GPTModel.

The model stops before its output layer and takes its rotary angles from the rows. Logits of every position are the
largest tensor of a step, and only those that predict a response are wanted: the last stage gives its hidden states,
and algorithms/vocab_parallel.py projects the wanted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import check_layout, megatron_fields
from headrace.models.architecture import Architecture, LinearRope, Llama3Rope, Vision, YarnRope
from services.trainer.megatron.configs import made
from services.trainer.megatron.layers import (
    SegmentAttention,
    SegmentedRow,
    has_transformer_engine,
    layer_specs,
    with_parts,
)
from services.trainer.megatron.linear_attention import with_linear_attention
from services.trainer.megatron.parallel import Layout
from services.trainer.megatron.routing_replay import SecondPasses
from services.trainer.plan.rows import NOBODY, Packing, RowImages, SampleImages


def give_hidden_states(model: GPTModel) -> GPTModel:
    """The same model, in place: its forward gives [B, S, H] on the last stage, and segmented rows find their angles."""
    if model.post_process:
        model.output_layer = PassThrough(model.output_layer)
    for name, module in list(model.named_modules()):
        for child, rotary in list(module.named_children()):
            if child == "rotary_pos_emb":
                setattr(model.get_submodule(name), child, RotaryAtPositions(rotary))
    return model


def output_weight(model: GPTModel) -> Tensor:
    """[V / tp, H] of a last stage: its own or the embedding's."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


class PassThrough(nn.Module):
    """Stands where the output layer was, with its weight (None where the embedding's is used)."""

    def __init__(self, output_layer: Any) -> None:
        super().__init__()
        self.register_parameter("weight", output_layer.weight)

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden, None


class RotaryAtPositions(nn.Module):
    """Megatron asks how long a row is and hands the answer back; a segmented row answers with its positions."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary
        self.axes: Callable[[], Tensor | None] = lambda: None
        """The next rows' positions [frequencies, B, S], each frequency's on its own axis; None: plain."""

    def get_rotary_seq_len(self, *arguments: Any, **named: Any) -> int | Tensor:
        """The row's length, or its positions [T]."""
        for argument in (*arguments, *named.values()):
            if isinstance(argument, SegmentedRow):
                return argument.positions
        length: int = self._rotary.get_rotary_seq_len(*arguments, **named)
        return length

    def forward(self, length: int | Tensor, **named: Any) -> Any:
        """Angles [length, 1, 1, d], or [T, 1, 1, d] at the positions; Yarn's scale comes with them."""
        if (found := self.axes()) is not None:
            return self._at_axes(found, **named)
        if isinstance(length, int):
            return self._rotary(length, **named)
        angles = self._rotary(int(length.max()) + 1, **named)
        return (angles[0][length], angles[1]) if isinstance(angles, tuple) else angles[length]

    def _at_axes(self, axes: Tensor, **named: Any) -> Tensor:
        """Angles [S, B, 1, d]: each frequency is in both halves of d."""
        angles: Tensor = self._rotary(int(axes.max()) + 1, **named)[:, 0, 0]
        both = axes.repeat(2, 1, 1).transpose(0, 2)
        return angles.gather(0, both.flatten(0, 1)).view(*both.shape)[:, :, None]


ModelProvider = Callable[[bool, bool, int | None, Callable[[], GPTModel]], GPTModel]
"""Makes a stage: is it the first, is it the last, its number among a rank's virtual stages, and headrace's own."""

# Megatron's constants for Llama 3's frequencies; only the factor is an argument there.
_MEGATRON_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def transformer_config(architecture: Architecture, args: MegatronArgs, layout: Layout) -> TransformerConfig:
    """Megatron's config; fused paths that need a GPU are off on a CPU."""
    check_layout(architecture, args)
    on_cpu = layout.device.type == "cpu"
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    values = {
        **megatron_fields(architecture),
        "activation_func": _activation(architecture),
        "expert_tensor_parallel_size": layout.etp_size,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "variable_seq_lengths": layout.pp_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths
        "moe_router_bias_update_rate": 0.0,  # the checkpoint balances its experts already
        # Sent in one batch, two stages' activations and gradients would meet the wrong buffers: each is the other's
        # neighbour on both sides.
        "overlap_p2p_comm": layout.vpp_size > 1,
        "batch_p2p_comm": not on_cpu and layout.vpp_size == 1,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
        "recompute_granularity": "selective" if args.recompute_activations else None,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": not on_cpu,
        # Megatron's fused kernel clamps before it adds the bias, and it has no GELU of that form.
        "bias_activation_fusion": not on_cpu and architecture.swiglu and architecture.swiglu_limit is None,
        "bias_dropout_fusion": not on_cpu and not architecture.add_bias_linear,  # grouped experts refuse it
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    kind = MLATransformerConfig if architecture.latent_attention else TransformerConfig
    virtual = layout.vpp_size if layout.vpp_size > 1 else None
    fixed = {
        "virtual_pipeline_model_parallel_size": virtual,
        "sequence_parallel": args.sequence_parallel and layout.tp_size > 1,
    }
    config = made(kind, args, values, fixed)
    if (rope := _yarn(architecture)) is not None:
        _set_yarn(config, rope)
    if (found := config.virtual_pipeline_model_parallel_size) != virtual:
        raise ConfigError(
            f"pipeline_model_parallel_layout has {found} stages for each pipeline rank: say so with "
            "--num-virtual-stages-per-pipeline-rank"
        )
    return config


def build_stages(
    architecture: Architecture,
    config: TransformerConfig,
    layout: Layout,
    packing: Packing,
    provider: ModelProvider | None = None,
) -> list[GPTModel]:
    """This rank's share of its stage, or of each of its virtual stages. Its weights are torch's: load a checkpoint.

    The last stage answers with hidden states; log-probs are services/trainer/model/pipeline.py's.
    """
    if architecture.latent_attention and config.sequence_parallel and not has_transformer_engine(layout):
        raise ConfigError(
            f"sequence_parallel with the latent attention of {architecture.family} needs Transformer Engine, which "
            "sums the gradients of its down-projections: install it, or leave tensor_model_parallel_size at 1"
        )
    stages = []
    for number in range(layout.vpp_size):
        virtual = number if layout.vpp_size > 1 else None
        is_first = layout.is_first_stage and number == 0
        is_last = layout.is_last_stage and number == layout.vpp_size - 1
        default = partial(_stage, architecture, config, layout, packing, virtual, is_first, is_last)
        model = default() if provider is None else provider(is_first, is_last, virtual, default)
        for parameter in model.parameters():  # Megatron makes norms in float32 unless its trainer's wrapper casts them
            parameter.data = parameter.data.to(config.params_dtype)
        stages.append(give_hidden_states(model).to(layout.device))
    return stages


def _stage(
    architecture: Architecture,
    config: TransformerConfig,
    layout: Layout,
    packing: Packing,
    virtual: int | None,
    is_first: bool,
    is_last: bool,
) -> GPTModel:
    spec = layer_specs(architecture, config, layout, virtual)
    if architecture.linear_attention:
        spec = with_linear_attention(spec, architecture.linear_attention)
    if uses_segment_attention(layout, packing):
        spec = with_parts(spec, lambda name, part: SegmentAttention if name == "core_attention" else part)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=not architecture.untie_embeddings_and_output_weights,
        position_embedding_type="rope" if _yarn(architecture) is None else "yarn",
        rotary_percent=architecture.rotary_percent,
        rotary_base=architecture.rotary_base,
        rope_scaling=isinstance(architecture.rope_scaling, Llama3Rope),
        rope_scaling_factor=_rope_factor(architecture),
        seq_len_interpolation_factor=rope.factor if isinstance(rope := architecture.rope_scaling, LinearRope) else None,
        vp_stage=virtual,
    )
    if architecture.scaled_embeddings and is_first:
        model.embedding.word_embeddings.register_forward_hook(scale_embeddings)
    return model


def scale_embeddings(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """Times the root of their size, in float32 and then in their type, as transformers rounds it."""
    return embedded * torch.tensor(embedded.shape[-1] ** 0.5).to(embedded.dtype)


def _activation(architecture: Architecture) -> Any:
    if architecture.swiglu_limit is not None:
        return quick_gelu
    if architecture.squared_relu:
        return squared_relu
    return silu if architecture.swiglu else partial(gelu, approximate="tanh")


def uses_segment_attention(layout: Layout, packing: Packing) -> bool:
    """Transformer Engine packs samples by itself, but knows no shared prompts and none of our context groups."""
    return not has_transformer_engine(layout) or packing == "shared_prompts" or layout.context.size > 1


def _yarn(architecture: Architecture) -> YarnRope | None:
    """Latent attention takes it from Megatron's config by itself."""
    rope = architecture.rope_scaling
    return rope if isinstance(rope, YarnRope) and architecture.latent_attention is None else None


def _set_yarn(config: Any, rope: YarnRope) -> None:
    """Attributes that GPTModel and attention read from a config that has no fields for them."""
    config.yarn_rotary_scaling_factor = rope.factor
    config.yarn_original_max_position_embeddings = rope.original_max_position_embeddings
    config.yarn_beta_fast, config.yarn_beta_slow = rope.beta_fast, rope.beta_slow
    config.yarn_mscale, config.yarn_mscale_all_dim = rope.mscale, rope.mscale_all_dim
    config.yarn_correction_range_round_to_int = not rope.has_exact_range


def _rope_factor(architecture: Architecture) -> float:
    scaling = architecture.rope_scaling
    if not isinstance(scaling, Llama3Rope):
        return 1.0
    for name, fixed in _MEGATRON_ROPE.items():
        if getattr(scaling, name) != fixed:
            raise ConfigError(f"rope_scaling {name} {getattr(scaling, name)}: Megatron-core has only {fixed}")
    return scaling.factor


Shown = tuple[Tensor, Tensor]
"""The slots of rows [S, B], and what the tower made of their images."""
Tower = Callable[[Sequence[SampleImages]], Tensor]
"""[1 + deepstack, embeddings of all images, H], without gradients: the embeddings, then what early layers add."""


class ImagePlaces:
    """Puts the images of a micro-batch into a model's passes. `enter` says which micro-batch comes next.

    `tower` makes the tower on ranks that have the embedding, or a layer that its features are added behind.
    """

    def __init__(self, stages: Sequence[GPTModel], vision: Vision, tower: Callable[[], Tower], layout: Layout) -> None:
        self._rotary_axes = list(vision.rotary_axes)
        self._layout = layout
        self._axes: Tensor | None = None
        self._shown: Shown | None = None
        self._tower: Tower | None = None
        hooked = [stage.embedding for stage in stages if stage.pre_process]
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, RotaryAtPositions):
                    module.axes = lambda: self._axes
            if stage.pre_process:
                stage.embedding.register_forward_hook(self._put)
            for layer in stage.decoder.layers:
                if layer.layer_number <= vision.deepstack:
                    layer.register_forward_hook(partial(self._add, SecondPasses()))
                    hooked.append(layer)
        if hooked:
            self._tower = tower()

    def enter(self, images: RowImages | None) -> None:
        """The next forward pass is of this micro-batch; None: of text alone."""
        self._axes = None if images is None else images.axes[self._rotary_axes]
        self._shown = None
        if images is not None and images.images and self._tower is not None:
            self._shown = images.slots.transpose(0, 1), self._tower(images.images)

    def _put(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        """[S, B, H], or this tensor rank's part of S with sequence parallelism."""
        if self._shown is None:
            return embedded
        slots, features = self._at(0, self._shown, embedded)
        return torch.where(slots == NOBODY, embedded, features)

    def _add(self, passes: SecondPasses[Shown | None], layer: Any, inputs: Any, output: Any) -> Any:
        """Behind a layer, whose output is its hidden states, and a context."""
        if (shown := passes.first(self._shown, trains=layer.training)) is None:
            return output
        hidden, *others = output
        slots, features = self._at(layer.layer_number, shown, hidden)
        return (torch.where(slots == NOBODY, hidden, hidden + features), *others)

    def _at(self, level: int, shown: Shown, hidden: Tensor) -> tuple[Tensor, Tensor]:
        slots, features = shown
        if len(slots) != len(hidden):
            slots = slots.chunk(self._layout.tp_size)[self._layout.tp_rank]
        return slots[..., None], features[level].to(hidden.dtype)[slots.clamp(min=0)]
