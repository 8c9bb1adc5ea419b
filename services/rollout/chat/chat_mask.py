"""Supervised fine-tuning trains the text that a conversation's assistants wrote.

The chat template shows which of its text each message became, whatever that message says. The opening of an assistant's
text is not trained: the role's mark, and a thought that the template leaves empty, as in a prompt that asks for no
thought. The rest is trained, with the mark that ends the turn: without it a model does not learn to stop.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.errors import ConfigError, InvalidArgument
from services.rollout.chat.chat_segments import Segment, Segments
from services.rollout.chat.chat_template import Message, Rendered, TracedTemplate

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen": ("<|im_end|>",),
    "qwen3": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "glm4": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "distill_qwen": ("<｜end▁of▁sentence｜>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "kimi": ("<|im_end|>",),
}
"""--loss-mask-type → the marks that end an assistant's turn, first the one that ends a conversation.

GLM's assistants end a turn by naming who speaks next.
"""
_TOOL_SPEAKS_NEXT = "<|observation|>"
_THINKING = (None, True, False)
_USER: Message = {"role": "user", "content": "."}


class ChatMask:
    """Raises ConfigError when the tokenizer or its chat template does not fit the options.

    With `keep_earlier_thoughts` each turn is written as if it were the conversation's last, with its thought. Otherwise
    earlier turns are written as the model will read them when it goes on with the conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        *,
        keep_earlier_thoughts: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._closings = _closings(tokenizer, family)
        self._ending = re.compile(rf"(?:{'|'.join(map(re.escape, self._closings))})\s*\Z")
        self._templates = {
            tools: TracedTemplate(tokenizer, with_tools=tools, variables=variables) for tools in (False, True)
        }
        self._sentinel = f"headrace{secrets.token_hex(16)}"
        self._keep_earlier_thoughts = keep_earlier_thoughts
        template = self._templates[False]
        prompts = {template.render([_USER], thinking=which, add_generation_prompt=True).suffix for which in _THINKING}
        self._prompts = sorted(prompts, key=len, reverse=True)
        if keep_earlier_thoughts:
            self._require_thoughts(template)

    def segments(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Segment]:
        """Returns the conversation's text, in order. Raises InvalidArgument when there is nothing to train."""
        trained = {i for i, message in enumerate(messages) if _is_trained(message)}
        if not trained:
            raise _refused("the conversation has no assistant's turn to train: add one, without step_loss_mask 0")
        rendered, probe = self._rendered(messages, tools)
        if missing := [i for i in trained if self._sentinel not in probe.written.get(i, "")]:
            raise _refused(f"the chat template leaves message {min(missing)} out, or changes what it says")
        segments = Segments(self._closings)
        segments.add(rendered.prefix)
        for position, text in rendered.written.items():
            if position in trained:
                self._add_turn(segments, position, messages[position], text, probe.written[position])
            else:
                segments.add(text)
        segments.add(rendered.suffix)
        return segments.finish()

    def _add_turn(self, segments: Segments, position: int, message: Message, text: str, probe: str) -> None:
        calls = message.get("tool_calls") or ()
        if any(name not in text for name in _names(calls)):
            raise _refused(f"the chat template leaves the tool calls of message {position} out")
        opening, _, ending = probe.partition(self._sentinel)
        known = next((prompt for prompt in (opening, *self._prompts) if text.startswith(prompt)), None)
        if known is None:
            raise _refused(f"the chat template writes message {position} behind none of its own prompts: {text[:80]!r}")
        body = text[len(known) :]
        segments.add(known)
        found = self._ending.search(body) if self._ending.search(ending) else None
        if found is None:
            segments.train(body, closing=self._closing_before_tools(calls))
        else:
            end = len(body[: found.end()].rstrip())
            segments.train(body[:end])
            segments.add(body[end:])

    def _closing_before_tools(self, calls: Sequence[Any]) -> str:
        return _TOOL_SPEAKS_NEXT if calls and _TOOL_SPEAKS_NEXT in self._closings else self._closings[0]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[Rendered, Rendered]:
        """Renders the conversation, and once more with a sentinel in place of each assistant's text."""
        template = self._templates[tools is not None]
        probes = [_with_content(message, self._sentinel) for message in messages]
        rendered, probe = template.render(messages, tools), template.render(probes, tools)
        if self._keep_earlier_thoughts:
            for start, end in _exchanges(messages):
                for whole, part in ((rendered, messages[start:end]), (probe, probes[start:end])):
                    alone = template.render(part).written
                    whole.written.update({start + i: alone.get(i, "") for i, m in enumerate(part) if _is_assistant(m)})
        return rendered, probe

    def _require_thoughts(self, template: TracedTemplate) -> None:
        thought = {"role": "assistant", "content": f"<think>{self._sentinel}</think>."}
        if self._sentinel not in template.render([_USER, thought]).written.get(1, ""):
            raise ConfigError(
                "the chat template never writes an assistant's thought: leave --keep-earlier-thoughts out",
                field="keep_earlier_thoughts",
            )


def _closings(tokenizer: Any, family: str) -> tuple[str, ...]:
    known = tokenizer.get_added_vocab()
    closings = tuple(closing for closing in FAMILIES[family] if closing in known)
    if not closings:
        raise ConfigError(
            f"the tokenizer has no token for any of {', '.join(FAMILIES[family])}: --loss-mask-type {family} is of "
            f"another family; choose one of {', '.join(FAMILIES)}",
            field="loss_mask_type",
        )
    return closings


def _exchanges(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) from each user message to the next one; the last exchange is left out."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return itertools.pairwise(starts)


def _is_assistant(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _is_trained(message: Message) -> bool:
    asked = message.get("step_loss_mask", 1)
    if asked not in (0, 1):
        raise _refused(f"step_loss_mask of a message is {asked!r:.80}, must be 0 or 1")
    return _is_assistant(message) and asked == 1


def _with_content(message: Message, content: str) -> Message:
    return {"role": "assistant", "content": content} if _is_assistant(message) else dict(message)


def _names(calls: Sequence[Any]) -> list[str]:
    """Returns the names of the functions that are called, in OpenAI's format or without its outer object."""
    return [str(call.get("function", call).get("name", "")) for call in calls]


def _refused(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="prompt.messages")
