"""Supervised fine-tuning trains the text that a conversation's assistants wrote.

The chat template shows which of its text each message became, whatever that message says. An assistant's text begins
with a prompt of the same template, as engines get it, with thinking or without. The prompt is not trained. The rest is,
with the mark that ends the turn: without it a model does not learn to stop.

Some templates drop an assistant's thought, and engines' prompts open one (DeepSeek). There the last turn is written as
the model would write it behind that prompt.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.errors import ConfigError, InvalidArgument
from headrace.models.tokenizer.chat import for_template, require_written
from services.rollout.chat.template import Message, Rendered, Segment, Segments, TracedTemplate

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen": ("<|im_end|>",),
    "qwen3": ("<|im_end|>",),
    "qwen3_5": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "glm4": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "distill_qwen": ("<｜end▁of▁sentence｜>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "kimi": ("<|im_end|>",),
    "gpt_oss": ("<|return|>", "<|call|>"),
    "olmo3": ("<|endoftext|>", "<|im_end|>"),
    "minimax_m2": ("[e~[",),
    "gemma3": ("<end_of_turn>",),
}
"""--loss-mask-type → the marks that end an assistant's turn, first the one that ends a conversation.

GLM's assistants end a turn by naming who speaks next.
"""
_READ_LATER: Mapping[str, str] = {"gpt_oss": "<|end|>"}
"""What a template writes in earlier turns for the mark that ended them: the model reads it and does not write it."""
_TOOL_SPEAKS_NEXT = "<|observation|>"
_THINKING = (None, True, False)
_USER: Message = {"role": "user", "content": "."}
_CONTEXTS: Mapping[str, Sequence[Message]] = {
    "user": (_USER,),
    "tool": (_USER, {"role": "assistant", "content": "."}, {"role": "tool", "content": "."}),
}
"""Conversations behind which the policy speaks, by their last role."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class _Thought:
    """A thought of the data. `closed` is its text up to the answer, where the data writes it so."""

    text: str
    closed: str | None = None

    def behind(self, prompt: str) -> str:
        """Returns what the model writes behind a prompt that has opened a thought, up to its answer."""
        blank = prompt.rpartition(_THINK)[2]
        if self.closed is not None:
            return self.closed.removeprefix(_THINK).removeprefix(blank)
        return f"{self.text}\n{_THINK_END}\n\n" if blank else f"{self.text}{_THINK_END}"


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant's turn: its message, what the template made of it, and of a sentinel in its place."""

    position: int
    message: Message
    text: str
    probe: str
    previous_role: str | None
    is_last: bool
    """Written as the conversation's last turn."""
    thought: _Thought | None
    """A thought that the template would drop."""


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
        self._read_later = _READ_LATER.get(family)
        self._ending = re.compile(rf"(?:{'|'.join(map(re.escape, self._closings))})\s*\Z")
        self._templates = {
            tools: TracedTemplate(tokenizer, with_tools=tools, variables=variables) for tools in (False, True)
        }
        self._tokenizer = tokenizer
        self._sentinel = f"headrace{secrets.token_hex(16)}"
        self._keep_earlier_thoughts = keep_earlier_thoughts
        self._prompts = {role: self._prompts_behind(context) for role, context in _CONTEXTS.items()}
        fields = ("reasoning_content", "thinking")
        self._reasoning = next((f for f in fields if self._writes({"content": ".", f: self._sentinel})), None)
        self._writes_thoughts = self._writes({"content": f"{_THINK}\n{self._sentinel}\n{_THINK_END}\n\n."})
        if keep_earlier_thoughts and not self._writes_thoughts and not self._opening_prompts("user"):
            raise ConfigError(
                "the chat template never writes an assistant's thought: leave --keep-earlier-thoughts out",
                field="keep_earlier_thoughts",
            )

    def segments(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Segment]:
        """Returns the conversation's text, in order. Raises InvalidArgument when there is nothing to train."""
        messages = [self._with_reasoning(message) for message in for_template(self._tokenizer, messages)]
        trained = {i for i, message in enumerate(messages) if _is_trained(message)}
        if not trained:
            raise _refused("the conversation has no assistant's turn to train: add one, without step_loss_mask 0")
        require_written(messages, lambda probes: self._templates[tools is not None].render(probes, tools).text)
        thoughts, last = self._dropped_thoughts(messages), self._last_turns(messages)
        shown = [
            _with_answer(message) if i in last and i in thoughts else message for i, message in enumerate(messages)
        ]
        rendered, probe = self._rendered(shown, tools)
        if missing := [i for i in trained if self._sentinel not in probe.written.get(i, "")]:
            raise _refused(f"the chat template leaves message {min(missing)} out, or changes what it says")
        segments = Segments(self._closings)
        segments.add(rendered.prefix)
        for position, text in rendered.written.items():
            if position in trained:
                previous = str(messages[position - 1]["role"]) if position else None
                turn = _Turn(
                    position,
                    shown[position],
                    text,
                    probe.written[position],
                    previous,
                    is_last=position in last,
                    thought=thoughts.get(position),
                )
                self._add_turn(segments, turn)
            else:
                segments.add(text)
        segments.add(rendered.suffix)
        parts = segments.finish()
        if not any(part.trained for part in parts):
            raise _refused(
                "no prompt of the chat template stands before the turns to train, because it opens a thought that they "
                "are written without: end the conversation with a turn to train, or add --keep-earlier-thoughts"
            )
        return parts

    def _add_turn(self, segments: Segments, turn: _Turn) -> None:
        calls = turn.message.get("tool_calls") or ()
        if any(name not in turn.text for name in _names(calls)):
            raise _refused(f"the chat template leaves the tool calls of message {turn.position} out")
        if turn.thought is not None and not turn.is_last:
            segments.add(turn.text)  # as the model reads it later, and as it would not write it
            return
        opening, _, ending = turn.probe.partition(self._sentinel)
        known, text = self._opened(turn, opening)
        if known is None:
            segments.add(text)
            return
        body = text[len(known) :]
        segments.add(known)
        if self._read_later is not None and body.endswith(self._read_later):
            segments.train(body.removesuffix(self._read_later))
            segments.add(self._read_later)
            return
        found = self._ending.search(body) if self._ending.search(ending) else None
        if found is None:
            segments.train(body, closing=self._closing_before_tools(calls))
        else:
            end = len(body[: found.end()].rstrip())
            segments.train(body[:end])
            segments.add(body[end:])

    def _opened(self, turn: _Turn, opening: str) -> tuple[str | None, str]:
        """Returns the prompt that the turn's text begins with, and the text; None where the turn is only read."""
        prompts = self._prompts.get(turn.previous_role or "", [])
        known = next((prompt for prompt in prompts if turn.text.startswith(prompt)), None)
        if turn.thought is None and known is not None:
            return known, turn.text
        if not turn.text.startswith(opening):
            raise _refused(
                f"the chat template writes message {turn.position} behind none of its own prompts: {turn.text[:80]!r}: "
                "a thought needs a prompt that asks for one, so look at --apply-chat-template-kwargs"
            )
        if turn.is_last and (opened := self._opening_prompts(turn.previous_role)):
            thought = turn.thought or _Thought("")
            return opened[0], opened[0] + thought.behind(opened[0]) + turn.text[len(opening) :]
        if turn.thought is not None:
            raise _refused(f"the chat template leaves the thought of message {turn.position} out: leave it out, too")
        return (None if prompts else opening), turn.text

    def _prompts_behind(self, context: Sequence[Message]) -> list[str]:
        """What the template writes behind a context for engines, the longest first.

        A prompt that changes the context, too, is none of a conversation that is written without that change: GLM's
        marks the user's message where no thought is asked for.
        """
        template = self._templates[False]
        try:
            plain = template.render(context)
            prompts = [template.render(context, thinking=which, add_generation_prompt=True) for which in _THINKING]
        except InvalidArgument:
            return []  # a template that refuses this context
        same = {each.suffix for each in prompts if (each.prefix, each.written) == (plain.prefix, plain.written)}
        return sorted(same, key=len, reverse=True)

    def _opening_prompts(self, role: str | None) -> list[str]:
        return [prompt for prompt in self._prompts.get(role or "", []) if prompt.rstrip().endswith(_THINK)]

    def _writes(self, message: Message) -> bool:
        try:
            rendered = self._templates[False].render([_USER, {"role": "assistant", **message}])
        except InvalidArgument:
            return False
        return self._sentinel in rendered.written.get(1, "")

    def _with_reasoning(self, message: Message) -> Message:
        """The same with a thought of its own field where the template looks for it."""
        name = next((name for name in _REASONING if _is_said(message.get(name))), None)
        if name is None or not _is_assistant(message):
            return message
        rest = {key: value for key, value in message.items() if key not in _REASONING}
        if self._reasoning or not self._writes_thoughts:
            return {**rest, self._reasoning or "reasoning_content": message[name]}
        return {**rest, "content": f"{_THINK}\n{message[name]}\n{_THINK_END}\n\n{message.get('content') or ''}"}

    def _dropped_thoughts(self, messages: Sequence[Message]) -> dict[int, _Thought]:
        """The thoughts of assistants that the template writes in no turn, by position."""
        found = {}
        for position, message in enumerate(messages):
            content = message.get("content") or ""
            if not _is_assistant(message):
                continue
            if _is_said(message.get("reasoning_content")) and not self._reasoning:
                found[position] = _Thought(message["reasoning_content"].strip())
            elif _THINK_END in content and not self._writes_thoughts:
                thought, mark, answer = content.partition(_THINK_END)
                if _THINK_END in answer:
                    raise _refused(f"message {position} has {_THINK_END} twice: write one thought, in front")
                found[position] = _Thought(thought, thought.lstrip() + mark)
        return found

    def _last_turns(self, messages: Sequence[Message]) -> set[int]:
        """The positions of turns that are written as a conversation's last ones."""
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
        found = set[int]()
        for start, end in itertools.pairwise([0, *starts, len(messages)]):
            if end == len(messages) or self._keep_earlier_thoughts:
                found.update([i for i in range(start, end) if _is_assistant(messages[i])][-1:])
        return found

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


def _with_answer(message: Message) -> Message:
    """The message without its thought."""
    content = message.get("content") or ""
    answer = content.partition(_THINK_END)[2] if _THINK_END in content else content
    return {key: value for key, value in message.items() if key not in _REASONING} | {"content": answer}


def _is_said(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _names(calls: Sequence[Any]) -> list[str]:
    """Returns the names of the functions that are called, in OpenAI's format or without its outer object."""
    return [str(call.get("function", call).get("name", "")) for call in calls]


def _refused(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="prompt.messages")
