"""One rank's share of a model: Megatron's modules, and their weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.job.megatron.arguments import MegatronArgs
from headrace.models.architecture import Architecture
from services.trainer.hugging_face.convert import Converter
from services.trainer.megatron.gpt.gpt import ModelProvider, build_stages, transformer_config
from services.trainer.megatron.packing import choose_packing
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.rows import Packing


@dataclass(frozen=True, slots=True)
class RankModel:
    """`stages` are this rank's virtual stages, one without them; `packing` is how samples are laid into its rows."""

    config: TransformerConfig
    packing: Packing
    stages: Sequence[GPTModel]
    converter: Converter

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        args: MegatronArgs,
        layout: Layout,
        packing: Packing | None,
        provider: ModelProvider | None = None,
    ) -> RankModel:
        """Its weights are whatever torch gave them: load a folder or restore a checkpoint next."""
        config = transformer_config(architecture, args, layout)
        chosen = choose_packing(packing, config, layout)
        stages = build_stages(architecture, config, layout, chosen, provider)
        return cls(config, chosen, stages, Converter(architecture, layout, stages))
