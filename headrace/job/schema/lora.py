"""The section of a job about LoRA: small matrices that are trained in the place of the model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headrace.job.schema.section import Above, Section

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output layer."""
_HIGHEST_RANK = 1 << 14


class LoraSection(Section):
    """Low-rank adaptation (https://arxiv.org/abs/2106.09685), with the meanings of the package peft."""

    lora_rank: Annotated[int, Field(gt=0, le=_HIGHEST_RANK)] | None = Field(
        None, description="Rank of the adapters B·A that are trained while the model's weights stay; absent: no LoRA."
    )
    lora_alpha: Above = Field(8.0, description="Adapters are multiplied by lora_alpha / lora_rank.")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of an adapter's input that is dropped in a training pass."
    )
    lora_target_modules: tuple[Annotated[str, Field(max_length=100)], ...] = Field(
        (ALL_LINEAR,),
        description="Layers that get an adapter, by their Hugging Face names: q_proj v_proj …; all-linear: every "
        "linear layer but the output layer.",
    )
    lora_init: Literal["kaiming", "gaussian"] = Field(
        "kaiming",
        description="How A begins: kaiming is peft's default, gaussian has the deviation 1 / lora_rank. B begins at 0.",
    )
    lora_load: Path | None = Field(
        None, description="Folder that peft or `headrace export --format peft` wrote: adapters to begin with."
    )
