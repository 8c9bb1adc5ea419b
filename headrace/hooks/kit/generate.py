"""`generate_single`: the policy's next turn in a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.hooks.kit.call import Call, current_call
from headrace.hooks.kit.completion import Completion, copied
from headrace.hooks.kit.engine import ask_engine
from headrace.hooks.kit.sglang_parser import tool_call_parser
from headrace.hooks.kit.template import Template, template_of
from headrace.hooks.kit.tool_call import opens_thought
from headrace.hooks.kit.trajectory import Trajectory

_AFTER_ABORT_SECONDS = 0.1
_OPENING_TOKENS = 16  # enough for the mark that opens a thought, whatever tokens it has
Conversation = str | Sequence[Mapping[str, Any]]


async def generate_single(
    conversation: Conversation,
    *,
    tools: Sequence[Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
) -> Completion:
    """Returns the policy's response to messages, or to a text as it is. Call it from a generate function.

    When the messages hold an earlier Completion as it was returned, its tokens are continued, and only what was said
    since is rendered; so is a text that goes on where an earlier one and its Completion end. Messages that were edited
    before it are a new prompt. A response is empty, and its sample is
    TRUNCATED, once --max-turns or --rollout-max-context-len leave no room. `tools` default to those of the row.
    Raises InvalidArgument when the chat template or the engine refuse, Unavailable when no engine answers in time.
    """
    call = current_call()
    template = template_of(call.args)
    trajectory = _continued(call, template, conversation, tools if tools is not None else call.tools)
    params = {**call.params(), **(sampling_params or {})}
    start = len(trajectory.response_tokens)
    in_thought = opens_thought(template.decode(trajectory.tokens[-_OPENING_TOKENS:], special=True))
    if _has_turns(call, trajectory):
        await _extend(call, trajectory, params)
    else:
        trajectory.is_cut = True
    written = trajectory.response_tokens[start:]
    seen = conversation if isinstance(conversation, str) else copied(conversation)
    completion = Completion.of(
        template.decode(written, special=False),
        template.decode(written, special=True),
        trajectory,
        seen,
        parser=tool_call_parser(call.args),
        in_thought=in_thought,
    )
    call.record(conversation, completion)
    return completion


def _continued(call: Call, template: Template, conversation: Conversation, tools: Sequence[Any] | None) -> Trajectory:
    if isinstance(conversation, str) and (before := _text_before(call, conversation)) is not None:
        completion, since = before
        return _with_context(completion.trajectory, template.text(since))
    position = None if isinstance(conversation, str) else _last_completion(conversation)
    if position is None:
        is_rendered = bool(call.args.get("apply_chat_template"))
        return Trajectory(template.prompt(conversation, tools, is_rendered=is_rendered))
    messages: Any = conversation
    continued: Trajectory = messages[position]["content"].trajectory
    return _with_context(continued, template.since(messages, position, tools, continued.tokens[-1]))


def _with_context(trajectory: Trajectory, tokens: Sequence[int]) -> Trajectory:
    """A copy that goes on with what the policy did not write."""
    continued = trajectory.copy()
    continued.append_context(tokens)
    return continued


def _text_before(call: Call, text: str) -> tuple[Completion, str] | None:
    """The longest text of this call that `text` begins with, its response included, and what was written since."""
    found: tuple[Completion, str] | None = None
    for completion in call.of_texts:
        for written in (completion.raw, str(completion)):
            whole = f"{completion.seen}{written}"
            if written and text.startswith(whole) and (found is None or len(text) - len(whole) < len(found[1])):
                found = completion, text[len(whole) :]
    return found


def _last_completion(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The position of the newest response, if nothing before it was edited since."""
    for position in range(len(messages) - 1, -1, -1):
        content, calls = messages[position].get("content"), messages[position].get("tool_calls") or ()
        if isinstance(content, Completion):
            was_edited = list(content.seen) != list(messages[:position]) or list(content.tool_calls) != list(calls)
            return None if was_edited else position
    return None


def _has_turns(call: Call, trajectory: Trajectory) -> bool:
    most = call.args.get("max_turns")
    return not trajectory.is_cut and (most is None or trajectory.turns < most)


async def _extend(call: Call, trajectory: Trajectory, params: dict[str, Any]) -> None:
    """Asks until the response has ended: an engine that takes new weights may abort it in its midst."""
    url = f"http://{call.args.sglang_router_ip}:{call.args.sglang_router_port}/generate"
    wanted, context = params["max_new_tokens"], call.args.get("rollout_max_context_len")
    while True:
        room = wanted if context is None else min(wanted, context - len(trajectory.tokens))
        if room <= 0:
            trajectory.is_cut = True
            return
        meta_info = await ask_engine(
            url,
            trajectory.tokens,
            {**params, "max_new_tokens": room},
            seconds=call.args.generate_timeout_seconds,
            routing_key=call.routing_key,
        )
        wanted -= len(trajectory.append_response(meta_info))
        if meta_info["finish_reason"]["type"] != "abort":
            return
        await asyncio.sleep(_AFTER_ABORT_SECONDS)  # the engine that aborted may not run yet
