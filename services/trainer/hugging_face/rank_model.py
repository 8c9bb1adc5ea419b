"""One rank's share of a model: Megatron's modules with their Hugging Face weights, the rows they take, a vision tower.

The tower is frozen and computed by transformers: nothing of it is trained, and no gradient reaches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.models.architecture import Architecture, Vision
from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.megatron.gpt import ImagePlaces, ModelProvider, build_stages, transformer_config
from services.trainer.megatron.layers import has_transformer_engine
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.rows import Packing, SampleImages


def choose_packing(asked: Packing | None, config: TransformerConfig, layout: Layout) -> Packing:
    """The job's choice; else `shared_prompts`, where that is exact and attention is as fast.

    Raises ConfigError when prompts are to be shared and the model's loss would not be the same.
    """
    obstacle = _counts_tokens(config)
    if asked == "shared_prompts" and obstacle:
        raise ConfigError(
            f"packing shared_prompts trains a prompt once for all its responses, but {obstacle} would count it once "
            "for each of them: pass --packing packed",
            field="packing",
        )
    if asked is not None:
        return asked
    return "packed" if obstacle or has_transformer_engine(layout) else "shared_prompts"


def _counts_tokens(config: TransformerConfig) -> str | None:
    """Names a part of the loss that depends on the number of tokens, and not only on what each of them sees."""
    if config.num_moe_experts is None:
        return None
    balancing = config.moe_router_load_balancing_type
    if config.moe_aux_loss_coeff and balancing not in ("none", ["none"]):
        return f"the experts' {balancing}"
    if config.moe_z_loss_coeff:
        return "the experts' z-loss"
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        return "the update of the router biases"
    if config.moe_expert_capacity_factor is not None:
        return "the experts' capacity"
    return None


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


_KEPT_BYTES = 256 << 20


class FrozenTower:
    """The vision tower of a Hugging Face folder. Features of the latest images are kept: they never change."""

    def __init__(self, folder: Path, vision: Vision, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModel

        source = HfFolder(folder)
        config = AutoConfig.from_pretrained(str(folder)).vision_config
        config._attn_implementation = "sdpa"
        self._model = AutoModel.from_config(config)
        names = [name for name in source.names if name.startswith(vision.tower)]
        weights = {name.removeprefix(vision.tower): source.tensor(name) for name in names}
        try:
            self._model.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            raise ConfigError(f"{folder}: its vision tower is not that of its config.json: {error}") from error
        for parameter in self._model.parameters():  # and not the rotary frequencies, which stay float32
            parameter.data = parameter.data.to(dtype)
        self._model.to(device).eval().requires_grad_(requires_grad=False)
        self._device, self._dtype, self._deepstack = device, dtype, vision.deepstack
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.no_grad()
    def __call__(self, images: Sequence[SampleImages]) -> Tensor:
        return torch.cat([self._features(each) for each in images], dim=1)

    def _features(self, images: SampleImages) -> Tensor:
        key = images.digest
        if (found := self._kept.get(key)) is None:
            pixels = torch.from_numpy(images.pixels.copy()).to(self._device, self._dtype)
            grids = torch.from_numpy(images.grids.copy()).to(self._device)
            output = self._model(pixels, grid_thw=grids)
            levels = output.deepstack_features if self._deepstack else ()
            found = self._kept[key] = torch.stack([output.pooler_output, *levels])
            while sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def image_places(
    model: RankModel, architecture: Architecture, hf_checkpoint: Path, layout: Layout
) -> ImagePlaces | None:
    """The tower of `hf_checkpoint`, and where its features go; None for a model of text alone."""
    if (vision := architecture.vision) is None:
        return None
    tower = partial(FrozenTower, hf_checkpoint, vision, model.config.params_dtype, layout.device)
    return ImagePlaces(model.stages, vision, tower, layout)
