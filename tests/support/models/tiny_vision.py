"""Tiny random models that read images, with tokenizer, template and image processor: `make_tiny_vision(folder)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.models.tiny_model import make_tiny_tokenizer

VOCAB_SIZE = 320
_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.15,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FAMILIES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
        {"fullatt_block_indexes": [1], "window_size": 56},
    ),
    "qwen3_vl": (
        {"head_dim": 32, "rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
}
"""What is particular in text and tower. As many layers as there are get features of the tower's."""
PATCH_VALUES = {"qwen2_5_vl": 3 * 2 * 14 * 14, "qwen3_vl": 3 * 2 * 16 * 16}
"""By family."""


def make_tiny_vision(
    folder: Path, family: str = "qwen2_5_vl", *, seed: int = 7, tied: bool = False, num_layers: int = 2
) -> Path:
    """A float32 Hugging Face folder. Images are of at most 16 image tokens."""
    tokenizer = make_vision_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    torch.manual_seed(seed)
    text, tower = _FAMILIES[family]
    config = CONFIG_MAPPING[family](
        text_config=_TEXT | text | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied},
        vision_config=_VISION | tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + float("norm" in name))
    model.save_pretrained(folder)
    make_processor(tokenizer, family).save_pretrained(folder)
    return folder


def vision_network(folder: Path) -> Any:
    """The whole model of a folder, in float64."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the tokens that stand around and for images."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast, family: str) -> Any:
    """Images become 4 to 16 image tokens."""
    patch, kind, video = (
        (16, Qwen3VLProcessor, Qwen3VLVideoProcessor)
        if family == "qwen3_vl"
        else (14, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    )
    pixels = (2 * patch) ** 2
    size = {"shortest_edge": 4 * pixels, "longest_edge": 16 * pixels}
    return kind(Qwen2VLImageProcessorPil(size=size, patch_size=patch), tokenizer, video(), chat_template=_TEMPLATE)
