"""The text of prompts as a run gives it to rewards: the conversation in the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.conversation import renderer_of
from headrace.limits import from_json


def rendered_prompts(args: HookArgs, prompts: Sequence[bytes]) -> list[str]:
    """Returns a text for each serialized prompt. Runs in a worker. Raises ConfigError without a tokenizer."""
    return [_text(args, sample_pb2.Prompt.FromString(prompt)) for prompt in prompts]


def plain_conversation(prompt: sample_pb2.Prompt) -> str:
    """The same without a model: ChatML, where the prompt is messages."""
    if prompt.WhichOneof("content") == "text":
        return prompt.text
    turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in prompt.messages.messages]
    return "".join([*turns, "<|im_start|>assistant\n"])


def _text(args: HookArgs, prompt: sample_pb2.Prompt) -> str:
    messages = [
        {"role": turn.role, "content": turn.content, **from_json(turn.extra_json)} for turn in prompt.messages.messages
    ]
    if prompt.WhichOneof("content") == "text":
        if not args.get("apply_chat_template"):
            return prompt.text
        messages = [{"role": "user", "content": prompt.text}]
    try:
        return renderer_of(args).render(messages, None)
    except InvalidArgument:  # the rollout service's check names it
        return plain_conversation(prompt)
