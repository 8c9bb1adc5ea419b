"""The tokenizer of Kimi K2 and Moonlight as it is published, made tiny: tiktoken.model, and the code that reads it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

PATTERN = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""What cuts a text into words before it is encoded; a fact of the published vocabularies."""
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_CORPUS = (
    "What is 12 + 345? It's the answer, isn't it. 今天天气很好，我们去公园。今天我们。  The other THE They're\n\n" * 3
)
_MERGES = 120
_MODULE = '''"""The published interface of a tokenizer over tiktoken."""
import os

import tiktoken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

from .words_{suffix} import read_ranks

RAN = {ran!r}


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    model_input_names = ["input_ids", "attention_mask"]
    pat_str = "|".join({pattern!r})

    def __init__(self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", added_tokens_decoder=None, **kwargs):
        with open(RAN, "a") as file:
            file.write(str(os.getpid()) + "\\n")
        self.vocab_file = vocab_file
        ranks = read_ranks(vocab_file)
        special = {{token.content: number for number, token in (added_tokens_decoder or {{}}).items()}}
        self.model = tiktoken.Encoding("tiny", pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=special)
        letters = bytes_to_unicode()
        self.bytes_of = {{letter: byte for byte, letter in letters.items()}}
        self.decoder = {{
            number: "".join(letters[byte] for byte in self.model.decode_single_token_bytes(number))
            for number in [*ranks.values(), *special.values()]
        }}
        self.encoder = {{text: number for number, text in self.decoder.items()}}
        super().__init__(
            bos_token=bos_token, eos_token=eos_token, added_tokens_decoder=added_tokens_decoder, **kwargs
        )

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.encoder

    def encode(self, text, **kwargs):
        return super().encode(text, **kwargs) if kwargs else self.model.encode(text, allowed_special="all")

    def decode(self, token_ids, **kwargs):
        return super().decode(token_ids, **kwargs) if kwargs else self.model.decode(token_ids)

    def _tokenize(self, text, **kwargs):
        return [self.decoder[number] for number in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.encoder[token]

    def _convert_id_to_token(self, index):
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes_of[letter] for letter in "".join(tokens)).decode("utf-8", "replace")
'''
_WORDS = """import base64


def read_ranks(path):
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in open(path, "rb"))}
"""


def publish(
    folder: Path, *, module: str = "tokenization_kimi", model_type: str = "kimi_k2", vocab_size: int = 0
) -> Path:
    """Adds the tokenizer to a model's folder; returns a file with the id of each process that has run its code."""
    folder.mkdir(parents=True, exist_ok=True)
    ran, suffix = folder.parent / f"{folder.name}-ran", module.rpartition("_")[2]
    ranks = _ranks()
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / f"{module}.py").write_text(_MODULE.format(suffix=suffix, ran=str(ran), pattern=list(PATTERN)))
    (folder / f"words_{suffix}.py").write_text(_WORDS)
    (folder / "configuration_deepseek.py").write_text("raise RuntimeError('never run')\n")
    added = {
        str(len(ranks) + place): {
            "content": name,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
        }
        | {"single_word": False}
        for place, name in enumerate(SPECIAL)
    }
    about = {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[2:]),
        "auto_map": {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (folder / "config.json").write_text(
        json.dumps(
            {"vocab_size": vocab_size or len(ranks) + len(SPECIAL)}
            | config
            | {"model_type": model_type, "auto_map": code}
        )
    )
    return ran


def _ranks() -> Mapping[bytes, int]:
    """A byte-level BPE: every byte, then the most frequent pairs of the corpus, one after the other."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in _CORPUS.split(" ")]
    while len(ranks) < 256 + _MERGES:
        pairs = Counter(pair for word in words for pair in pairwise(word) if pair[0] + pair[1] not in ranks)
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        words = [_merged(word, best) for word in words]
    return ranks


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged
