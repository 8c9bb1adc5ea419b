"""A model's architecture, read from its Hugging Face config.json. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from headrace.config.megatron import MegatronArgs
from headrace.config.megatron_owned import ARCHITECTURAL
from headrace.errors import ConfigError

FAMILIES: Sequence[str] = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretched rotary frequencies (config.json: rope_scaling of type llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder; names are Megatron's."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    vocab_size: int
    rotary_base: float
    rotary_percent: float
    norm_epsilon: float
    normalization: str
    swiglu: bool
    qk_layernorm: bool
    add_qkv_bias: bool
    untie_embeddings_and_output_weights: bool
    rope_scaling: Llama3Rope | None

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """Raises ConfigError when the folder is no checkpoint, or of a family that headrace does not know yet."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"hf_checkpoint {folder} has no config.json: name a Hugging Face model folder")
        raw = json.loads(path.read_text())
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"{path}: model_type {family!r} is not supported yet; supported: {', '.join(FAMILIES)}")
        heads = raw["num_attention_heads"]
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return cls(
            family=family,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_hidden_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=raw.get("num_key_value_heads") or heads,
            kv_channels=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=raw["max_position_embeddings"],
            vocab_size=raw["vocab_size"],
            rotary_base=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rotary_percent=1.0,
            norm_epsilon=raw["rms_norm_eps"],
            normalization="RMSNorm",
            swiglu=_is_swiglu(raw, path),
            qk_layernorm=family == "qwen3",
            add_qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            untie_embeddings_and_output_weights=not raw.get("tie_word_embeddings", False),
            rope_scaling=_rope_scaling(rope, path),
        )

    def contradictions(self, given: MegatronArgs) -> list[str]:
        """A sentence for each architecture flag that says something else than the checkpoint."""
        mine = _flat(self) | _ALWAYS
        wrong = [
            f"--{name.replace('_', '-')} {wanted} contradicts the checkpoint, whose config.json says "
            f"{mine.get(name, 'nothing of it')}: leave the flag out"
            for name, wanted in given.given(ARCHITECTURAL).items()
            if name not in mine or wanted != mine[name]
        ]
        if given.seq_length is not None and given.seq_length > self.max_position_embeddings:
            wrong.append(
                f"--seq-length {given.seq_length} is longer than max_position_embeddings "
                f"{self.max_position_embeddings} of the checkpoint: leave the flag out"
            )
        return wrong


_ALWAYS = {
    "position_embedding_type": "rope",
    "no_position_embedding": True,
    "disable_bias_linear": True,
    "add_bias_linear": False,
    "tokenizer_type": "HuggingFaceTokenizer",
}


def _flat(part: Any) -> dict[str, Any]:
    """Values by Megatron's names, those of the parts (experts, latent attention) beside those of the whole."""
    values: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        values |= _flat(value) if is_dataclass(value) else {field.name: value}
    return values


def _is_swiglu(raw: dict[str, Any], path: Path) -> bool:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act {activation!r} is not supported; supported: 'silu'")
    return True


def _rope_scaling(rope: dict[str, Any], path: Path) -> Llama3Rope | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_scaling of type {kind!r} is not supported; supported: default, llama3")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
