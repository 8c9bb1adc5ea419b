"""A model's folder without weights: a tokenizer whose tokens are bytes, with a chat template that knows tools.

Functions that load the tokenizer of `args.hf_checkpoint` are tried with it where the job names no model that is here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
TURN_END_ID = 257
TOOLS_START, TOOLS_END = "<tools>", "</tools>"
_SPECIAL = {TURN_START: 256, TURN_END: TURN_END_ID}
_MAX_TOKENS = 32_768
_CHAT_TEMPLATE = (
    "{% if tools %}"
    "<|im_start|>system\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools><|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_stand_in_model(folder: Path) -> None:
    """Writes the files that transformers' AutoTokenizer and AutoConfig read."""
    tokens = [{"id": number, "content": text} | _PLAIN_TOKEN for text, number in _SPECIAL.items()]
    spaces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": spaces,
        "post_processor": None,
        "decoder": spaces,
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in _characters().items()}, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "model_max_length": _MAX_TOKENS,
        "chat_template": _CHAT_TEMPLATE,
    }
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("config.json", {"model_type": "qwen2", "vocab_size": TURN_END_ID + 1, "eos_token_id": TURN_END_ID}),
    ):
        (folder / name).write_text(json.dumps(content))


def stand_in_tokens(text: str) -> list[int]:
    """The tokens of a response, with the one that ends its turn."""
    return [*text.encode(), TURN_END_ID]


def stand_in_text(tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")


_PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _characters() -> dict[int, str]:
    """The printable character that stands for each byte in files of byte-level tokenizers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
