"""A tiny random Qwen2.5-VL with tokenizer, chat template and image processor: `make_tiny_vision(folder)`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
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
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "window_size": 56,
    "initializer_range": 0.15,
}


def make_tiny_vision(folder: Path, *, seed: int = 7, tied: bool = False, num_layers: int = 2) -> Path:
    """A float32 Hugging Face folder. Images are of at most 16 image tokens."""
    tokenizer = make_vision_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied},
        vision_config=_VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + float("norm" in name))
    model.save_pretrained(folder)
    make_processor(tokenizer).save_pretrained(folder)
    return folder


def vision_network(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """The whole model of a folder, in float64."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the tokens that stand around and for images."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Images become 4 to 16 image tokens."""
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28})
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=_TEMPLATE)
