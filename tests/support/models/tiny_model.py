"""A tiny random Qwen3 with a real tokenizer and chat template, made on the spot: `make_tiny_qwen3(folder)`."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = (
    "What is 1 + 2? The answer is 3.",
    "Add the numbers 4, 5, 6, 7, 8, 9 and 0.",
    "system user assistant tool\n",
    "The quick brown fox jumps over the lazy dog.",
)


def make_tiny_qwen3(
    folder: Path, *, seed: int = 0, tie_word_embeddings: bool = True, num_layers: int = 2, ffn_size: int = 128
) -> Path:
    """Writes a Hugging Face folder (float32 weights, config, tokenizer, chat template) and answers its path."""
    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_padded_vocab(len(tokenizer)),
            hidden_size=64,
            intermediate_size=ffn_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        )
    )
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens: every text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def _padded_vocab(size: int, multiple: int = 64) -> int:
    return -(-size // multiple) * multiple
