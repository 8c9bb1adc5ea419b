"""Writes tiny-model/: a Qwen2.5-VL of two layers with random weights, which knows 64 words. It runs on any CPU.

It stands in for a real one, so that the whole path of an image can be tried without a download.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
)

SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = (*SPECIAL, "<unknown>", "Which", " color", " is", " it", "?", " red", " green", " blue")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    vocabulary |= {f" word{number}": number for number in range(len(WORDS), 64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # noqa: S106  # a token of a text
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\?"), "isolated")
    words.decoder = decoders.Fuse()  # a text is its tokens one behind the other: engines split it again
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unknown>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **marks)
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    made.chat_template = TEMPLATE
    return made


def main(folder=Path("tiny-model")):
    torch.manual_seed(1)
    words = tokenizer()
    ids = {name: words.convert_tokens_to_ids(name) for name in SPECIAL}
    layers = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(
        text_config={**layers, **heads, **ends, "rope_parameters": rotary},
        vision_config={**tower, "fullatt_block_indexes": [1], "window_size": 56, "initializer_range": 0.15},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28})
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2_5_VLProcessor(images, words, Qwen2VLVideoProcessor(), chat_template=TEMPLATE).save_pretrained(folder)


if __name__ == "__main__":
    main()
