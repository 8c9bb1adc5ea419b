"""The text of prompts as a run gives it to rewards: the conversation in the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.hooks.args import HookArgs
from headrace.limits import from_json
from headrace.models.tokenizer.tokenizer import load_tokenizer


def rendered_prompts(args: HookArgs, prompts: Sequence[bytes]) -> list[str]:
    """Returns a text for each serialized prompt. Runs in a worker. Raises ConfigError without a tokenizer."""
    read = [sample_pb2.Prompt.FromString(prompt) for prompt in prompts]
    is_templated = bool(args.get("apply_chat_template"))
    if not is_templated and all(prompt.WhichOneof("content") == "text" for prompt in read):
        return [prompt.text for prompt in read]
    trusts = bool(args.get("trust_remote_code"))
    tokenizer = load_tokenizer(Path(args.hf_checkpoint), trust_remote_code=trusts)
    return [_text(tokenizer, args, prompt, is_templated=is_templated) for prompt in read]


def plain_conversation(prompt: sample_pb2.Prompt) -> str:
    """The same without a model: ChatML, where the prompt is messages."""
    if prompt.WhichOneof("content") == "text":
        return prompt.text
    turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in prompt.messages.messages]
    return "".join([*turns, "<|im_start|>assistant\n"])


def _text(tokenizer: Any, args: HookArgs, prompt: sample_pb2.Prompt, *, is_templated: bool) -> str:
    if prompt.WhichOneof("content") == "text" and not is_templated:
        return prompt.text
    messages = [{"role": "user", "content": prompt.text}]
    if prompt.WhichOneof("content") == "messages":
        messages = [
            {"role": turn.role, "content": turn.content, **from_json(turn.extra_json)}
            for turn in prompt.messages.messages
        ]
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(args.get("apply_chat_template_kwargs") or {})
            )
        )
    except Exception:  # noqa: BLE001  # a template is code of the checkpoint's author: the rollout's check names it
        return plain_conversation(prompt)
