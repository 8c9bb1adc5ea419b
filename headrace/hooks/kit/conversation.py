"""Conversations of users' functions with the policy: `generate_single` and `chat`.

Each call of a function has a session (`headrace.session`), which holds the tokens that the engine sampled. A sample
that the function returns without tokens gets those of its conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.engine import ask_engine
from headrace.hooks.kit.tool_call import ToolCall, divided_response, opens_thought, tool_call_parser
from headrace.hooks.sample import Sample
from headrace.models.tokenizer.chat import render_prompt
from headrace.models.tokenizer.tokenizer import load_tokenizer
from headrace.rpc import tracing
from headrace.session import Ask, Completion, RecordedAnswer, SessionRecord, Tokens
from headrace.trajectory import Status, bounded_turns

_AFTER_ABORT_SECONDS = 0.1
Messages = Sequence[Mapping[str, Any]]
Conversation = str | Messages


class AssistantMessage(dict[str, Any]):
    """`{"role": "assistant", "content": …}`, with `tool_calls` where tools were called: append it to the messages."""

    @property
    def content(self) -> Completion:
        """The text before the first tool call. Its tokens are those of the whole response."""
        content: Completion = self["content"]
        return content

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls by name and arguments; in the message they have the form that chat templates take."""
        return [ToolCall(call["function"]) for call in self.get("tool_calls", ())]


async def generate_single(
    conversation: Conversation,
    *,
    tools: Sequence[Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
) -> Completion:
    """Returns the policy's response to messages, or to a text as it is. Call it from a generate function.

    When the messages hold an earlier response as it was returned, its tokens are continued, and only what was said
    since is rendered; so is a text that goes on where an earlier one and its response end. Messages that were edited
    before it are a new prompt. A response is empty, and its sample is TRUNCATED, once --max-turns or
    --rollout-max-context-len leave no room. `tools` default to those of the row.
    Raises InvalidArgument when the chat template or the engine refuse, Unavailable when no engine answers in time.
    """
    call = current_call()
    ask = call.ask(conversation, tools if tools is not None else call.tools)
    answer = await _answered(call, ask, {**call.params(), **(sampling_params or {})})
    said = None if isinstance(conversation, str) else {"role": "assistant", "content": answer.spoken}
    turn = call.session.add(replace(ask, messages=plain_text(ask.messages)), answer, said)
    completion = Completion.of(
        answer.spoken, turn, parser=tool_call_parser(call.args), in_thought=opens_thought(ask.text)
    )
    call.note(conversation, completion)
    return completion


async def chat(
    messages: Messages, tools: Sequence[Any] | None = None, sampling_params: Mapping[str, Any] | None = None
) -> AssistantMessage:
    """Returns the policy's next message. Call it from a generate function; limits and errors are `generate_single`'s.

    Appended to the messages as it is, it is continued by its tokens. Tool calls are parsed where tools were offered:
    `tools`, by default those of the prompt's row. The response is empty once a limit leaves no room.
    """
    call = current_call()
    response = await generate_single(messages, tools=tools, sampling_params=sampling_params)
    offered = tools if tools is not None else call.tools
    said, tool_calls = str(response), list[dict[str, Any]]()
    if offered and (found := divided_response(response, tools=offered)).calls:
        said = renderer_of(call.args).without_special(found.before)
        tool_calls = _in_message(found.calls, sum(len(message.get("tool_calls") or ()) for message in messages))
    content = response.as_content(said, is_open=bool(tool_calls))
    message = AssistantMessage(role="assistant", content=content, **({"tool_calls": tool_calls} if tool_calls else {}))
    call.session.know(response.turn, [*messages, message])
    call.note(messages, content)
    return message


def _in_message(calls: Sequence[ToolCall], num_before: int) -> list[dict[str, Any]]:
    """OpenAI's form, but for the arguments, which chat templates take as an object."""
    return [
        {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls, start=num_before)
    ]


async def _answered(call: Call, ask: Ask, params: Mapping[str, Any]) -> RecordedAnswer:
    """Asks until the response has ended: an engine that takes new weights may abort it in its midst."""
    url = f"http://{call.args.sglang_router_ip}:{call.args.sglang_router_port}/generate"
    wanted, context, is_cut = (
        params["max_new_tokens"],
        call.args.get("rollout_max_context_len"),
        not call.has_turns(ask),
    )
    tokens, log_probs, meta_infos = list[int](), list[float](), list[dict[str, Any]]()
    while not is_cut:
        room = wanted - len(tokens)
        if context is not None:
            room = min(room, context - len(ask.tokens) - len(tokens))
        if room <= 0:
            is_cut = True
            break
        with tracing.span(tracing.GENERATE) as span:
            meta_info = await ask_engine(
                url,
                [*ask.tokens, *tokens],
                {**params, "max_new_tokens": room},
                seconds=call.args.generate_timeout_seconds,
                routing_key=call.routing_key,
            )
            span.set(tracing.LANE, tracing.engine_of(str(meta_info.get("weight_version", ""))))
            span.set(tracing.OUTPUT_TOKENS, int(meta_info.get("completion_tokens", 0)))
        written = meta_info.pop("output_token_logprobs", None)  # (log-prob, token id, text) of each token
        if written is None:
            raise InvalidArgument("the engine's answer has no output_token_logprobs: ask it with return_logprob")
        tokens += [token for _, token, *_ in written]
        log_probs += [log_prob for log_prob, *_ in written]
        meta_infos.append(meta_info)
        if meta_info["finish_reason"]["type"] != "abort":
            break
        await asyncio.sleep(_AFTER_ABORT_SECONDS)  # the engine that aborted may not run yet
    renderer = renderer_of(call.args)
    raw, end = renderer.decode(tokens, special=True), renderer.decode(tokens[-1:], special=True)
    return RecordedAnswer(
        tuple(tokens),
        tuple(log_probs),
        (),
        Status.TRUNCATED if is_cut else Status.COMPLETED,
        raw.removesuffix(end),
        end=end if raw.endswith(end) else "",
        spoken=renderer.decode(tokens, special=False),
        meta_infos=meta_infos,
        is_cut=is_cut,
    )


@dataclass
class Call:
    """One call of the user's function, and its session; tasks that it starts belong to it."""

    args: HookArgs
    samples: Sequence[Sample]
    sampling_params: Mapping[str, Any]
    latest: Completion | None = None
    routing_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Its requests go to one engine, whose prefix cache its turns share."""
    _of_conversations: dict[int, tuple[object, Completion]] = field(default_factory=dict)
    """The latest completion of each conversation, by the conversation's id; the object is stored so that it lives."""
    _session: SessionRecord | None = None
    _requests: int = 0

    @property
    def session(self) -> SessionRecord:
        if self._session is None:
            self._session = SessionRecord(renderer_of(self.args))
        return self._session

    def ask(self, conversation: Conversation, tools: Sequence[Any] | None) -> Ask:
        """Raises InvalidArgument where the chat template refuses it."""
        if not isinstance(conversation, str):
            return self.session.ask_behind(conversation, tools) or self.session.ask(conversation, tools)
        is_rendered = bool(self.args.get("apply_chat_template"))
        return self.session.ask_text(conversation, None if is_rendered else renderer_of(self.args).tokens_of_text)

    def has_turns(self, ask: Ask) -> bool:
        """False once a limit has ended the conversation that the request continues."""
        before, most = ask.parent.path() if ask.parent else [], self.args.get("max_turns")
        return not any(turn.answer.is_cut for turn in before) and (most is None or len(before) < most)

    def note(self, conversation: Conversation, completion: Completion) -> None:
        self._of_conversations[id(conversation)] = (conversation, completion)
        self.latest = completion

    def completion_of(self, sample: Sample) -> tuple[Completion | None, bool]:
        """Returns what a sample's conversation ended with.

        The second is True for a conversation that the function has left in its midst, at the limit of its turns.
        """
        response: object = sample.response
        if isinstance(response, Completion):
            return response, False
        latest = self.latest if len(self.samples) == 1 and not response else None
        if id(sample.prompt) in self._of_conversations:
            latest = self._of_conversations[id(sample.prompt)][1]
            if isinstance(sample.prompt, str) and response != latest:
                latest = self._last_behind(latest)
        return latest, latest is not None and latest.is_open and not response

    def _last_behind(self, first: Completion) -> Completion:
        """The newest completion that goes on where `first` ended, or `first`: a text that goes on is another object."""
        every = (completion for _, completion in reversed(self._of_conversations.values()))
        return next((one for one in every if any(turn is first.turn for turn in one.turn.path())), first)

    def params(self) -> dict[str, Any]:
        """Returns the job's sampling parameters; each request has its own seed, which depends on the job's alone."""
        params = dict(self.sampling_params)
        self._requests += 1
        if "sampling_seed" in params and self._requests > 1:
            digest = hashlib.sha256(f"{params['sampling_seed']}/{self._requests}".encode()).digest()
            params["sampling_seed"] = int.from_bytes(digest[:4], "big") >> 1
        return params

    @property
    def tools(self) -> Sequence[Any] | None:
        """The tool definitions of the prompt's row, or None."""
        return self.samples[0].metadata.get("tools") if self.samples else None


_CALL: ContextVar[Call] = ContextVar("headrace_generate_call")


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """The block runs the user's function for `call`."""
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)


def current_call() -> Call:
    """Raises FailedPrecondition outside a generate function."""
    call = _CALL.get(None)
    if call is None:
        raise FailedPrecondition(
            "generate_single was called outside a generate function: name yours with --custom-generate-function-path, "
            "or try it with `headrace check hook`"
        )
    return call


def attach_tokens(sample: Sample, call: Call) -> Sample:
    """Returns a copy with plain texts; one without tokens gets those of its conversation, if it has one here.

    What the function has set itself stays: response, mask, status, reward.
    """
    completion, was_cut = call.completion_of(sample)
    texts = {name: plain_text(getattr(sample, name)) for name in ("prompt", "response", "metadata", "train_metadata")}
    made = replace(sample, **texts)
    if completion is None or sample.tokens:
        return made
    turn, branch = completion.turn, completion.turn.branch()
    made.tokens, made.response_length = [*branch.prompt, *branch.response], len(branch.response)
    made.loss_mask = [*branch.loss_mask] if sample.loss_mask is None else sample.loss_mask
    made.rollout_log_probs = [*branch.log_probs]
    for meta_info in (meta_info for one in turn.path() for meta_info in one.answer.meta_infos):
        made.update_from_meta_info(None, meta_info)
    if was_cut or turn.answer.is_cut:
        made.status = Sample.Status.TRUNCATED
    if sample.status is not Sample.Status.PENDING:
        made.status = sample.status
    made.response = made.response or completion.whole
    if made.turns is None and turn.said:
        made.turns = bounded_turns(turn.said)
    return made


def build_loss_mask(sample: Sample) -> list[int] | None:
    """Returns the mask of a sample whose response is a Completion, 1 where the policy wrote; None for any other."""
    response: object = sample.response
    return [*response.turn.branch().loss_mask] if isinstance(response, Completion) else None


def plain_text(value: Any) -> Any:
    """Returns a copy of messages, lists and dicts with plain text in place of completions."""
    if isinstance(value, list | tuple):
        return [plain_text(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_text(item) for key, item in value.items()}
    return str(value) if isinstance(value, Completion) else value


class KitRenderer:
    """A checkpoint's tokenizer and its chat template, with the job's variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = variables

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        first: int = 0,
    ) -> str:
        return render_prompt(self._tokenizer, messages, tools, {**self._variables, **variables}, first=first)

    def tokens_of_rendered(self, text: str) -> Tokens:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def tokens_of_text(self, text: str) -> Tokens:
        """Returns the tokens of a text that no template has written: it begins as the tokenizer begins a sequence."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def without_special(self, text: str) -> str:
        """Returns the text without the special tokens that are written in it."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text


def renderer_of(args: HookArgs) -> KitRenderer:
    """The renderer of the job's checkpoint. Loads the tokenizer, once a process."""
    variables = json.dumps(args.get("apply_chat_template_kwargs") or {})
    return _loaded(str(args.hf_checkpoint), variables, bool(args.get("trust_remote_code")))


@cache
def _loaded(hf_checkpoint: str, variables: str, trust_remote_code: bool) -> KitRenderer:
    tokenizer = load_tokenizer(Path(hf_checkpoint), trust_remote_code=trust_remote_code)
    return KitRenderer(tokenizer, json.loads(variables))
