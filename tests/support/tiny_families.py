"""Tiny random checkpoints of every family, made by transformers: `make_tiny(folder, "llama", tied=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.tiny_model import make_tiny_tokenizer

VOCAB_SIZE = 320
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.15,  # far from a uniform distribution, so that a wrong weight shows
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_tiny(
    folder: Path, family: str, *, tied: bool, seed: int = 7, vocab_size: int = VOCAB_SIZE, num_layers: int = 2
) -> Path:
    """A float32 Hugging Face folder with a tokenizer; untied Llama has Llama 3's stretched rotary frequencies."""
    torch.manual_seed(seed)
    model = _model(family, {"tie_word_embeddings": tied, "vocab_size": vocab_size, "num_hidden_layers": num_layers})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise, which hides mix-ups
                parameter.copy_(torch.randn_like(parameter) * 0.1 + float("norm" in name))
    model.save_pretrained(folder, max_shard_size="100KB")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def _model(family: str, chosen: Mapping[str, Any]) -> PreTrainedModel:
    shape: dict[str, Any] = _SHAPE | dict(chosen)
    if family == "llama":
        rope = {} if chosen["tie_word_embeddings"] else {"rope_parameters": _LLAMA3_ROPE}
        return LlamaForCausalLM(LlamaConfig(**shape, **rope))
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32))
