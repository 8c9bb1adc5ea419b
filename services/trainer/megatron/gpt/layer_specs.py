"""The modules that this rank's layers are made of."""

from __future__ import annotations

from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.models.architecture import Architecture
from services.trainer.megatron.gpt.latent_attention import with_latent_attention
from services.trainer.megatron.gpt.norms import MarkedNorm, with_marked_norms
from services.trainer.megatron.gpt.post_norms import with_post_norms
from services.trainer.megatron.parallel import Layout


def has_transformer_engine(layout: Layout) -> bool:
    """Transformer Engine's layers where it is installed, Megatron's own elsewhere."""
    return layout.device.type == "cuda" and find_spec("transformer_engine") is not None


def layer_specs(
    architecture: Architecture, config: TransformerConfig, layout: Layout, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or with experts as the architecture says."""
    with_te = has_transformer_engine(layout)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_te, normalization=architecture.normalization, vp_stage=vp_stage
    )
    if not with_te:
        block = with_marked_norms(block)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        if architecture.post_norms:
            with_post_norms(layer, block.layer_norm if with_te else MarkedNorm)
        if architecture.latent_attention:
            with_latent_attention(layer, architecture.latent_attention, with_te=with_te)
    return block
