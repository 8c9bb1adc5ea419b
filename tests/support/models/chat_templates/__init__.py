"""Real models' chat templates with tiny tokenizers: `make_chat_tokenizer("qwen3")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.models.tiny_model import make_tiny_tokenizer

_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
_DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")
)
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_KIMI = ("<|im_assistant|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>")

_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """`family` as --loss-mask-type names it, its special tokens besides Qwen's, and its first token of a text."""

    family: str
    special_tokens: tuple[str, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None
    """Absent: Qwen's."""


CHAT_MODELS: Mapping[str, ChatModel] = {
    "qwen2.5": ChatModel("qwen"),
    "qwen3": ChatModel("qwen3", ("<think>", "</think>")),
    "qwen3.5": ChatModel("qwen3_5", ("<think>", "</think>")),
    "qwen3_vl": ChatModel("qwen"),
    "glm4.5": ChatModel("glm4", _GLM),
    "glm4.6": ChatModel("glm4", _GLM),
    "deepseek_v3.1": ChatModel("deepseek", _DEEPSEEK + _DEEPSEEK_TOOLS, _DEEPSEEK[0]),
    "deepseek_r1_distill_qwen": ChatModel("distill_qwen", _DEEPSEEK + _DEEPSEEK_TOOLS, _DEEPSEEK[0]),
    "llama3": ChatModel("llama3", _LLAMA, _LLAMA[0]),
    "llama3.1": ChatModel("llama3", _LLAMA, _LLAMA[0]),
    "kimi_k2": ChatModel("kimi", _KIMI),
    "gpt_oss": ChatModel("gpt_oss", _HARMONY),
    "olmo3": ChatModel("olmo3", eos_token="<|endoftext|>"),
    "minimax_m2": ChatModel("minimax_m2", _MINIMAX),
    "gemma3": ChatModel("gemma3", _GEMMA, *_GEMMA[:2]),
    "smollm2": ChatModel("qwen"),
}


def make_chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tiny byte-level tokenizer that merges line breaks, with the model's template and special tokens."""
    model, tokenizer = CHAT_MODELS[name], make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in model.special_tokens])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.bos_token, tokenizer.eos_token = model.bos_token, model.eos_token or tokenizer.eos_token
    tokenizer.chat_template = (Path(__file__).parent / f"{name}.jinja").read_text()
    return tokenizer
