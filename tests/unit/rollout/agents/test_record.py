"""A session's record against clients of all kinds: every sampled token is trained once, as it was sampled."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from headrace.hooks.kit.tool_call import SplitResponse, divided
from headrace.session import Ask, Branch, RecordedAnswer, SessionRecord, prefix_keys
from headrace.trajectory import PolicyRange, Status, check_ranges
from services.rollout.agents.dialects.chat import Function, Message, ToolCallMessage
from services.rollout.agents.dialects.core import assistant_message
from services.rollout.agents.tool_calls import in_message
from services.rollout.production.prompts import PromptEncoder
from tests.support.models.chat_templates import make_chat_tokenizer

ENDS: Mapping[str, str] = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama3.1": "<|eot_id|>",
    "glm4.6": "<|user|>",
    "deepseek_v3.1": "<｜end▁of▁sentence｜>",
    "kimi_k2": "<|im_end|>",
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
WORDS = ("the", "answer", "is", " 42", "é", "\n", "  ", "ü💧", "{", "so,")


def plain(thread: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template() for message in thread]


@dataclass
class Policy:
    """Says something to each request; its tokens are the text's bytes, as no tokenizer would divide it."""

    encoder: PromptEncoder
    end: str
    choose: random.Random
    requests: list[tuple[Ask, RecordedAnswer]] = field(default_factory=list)
    version: int = 0
    most_calls: int = 2

    def answer(self, ask: Ask, *, tools: bool) -> RecordedAnswer:
        choose = self.choose
        text = "".join(choose.choices(WORDS, k=choose.randint(1, 6)))
        if choose.random() < 0.3:
            text = f"<think>\n{choose.choice(WORDS)} {len(self.requests)}\n</think>\n\n{text}"
        if tools and choose.random() < 0.5:
            written = [
                f'<tool_call>\n{{"name":"add",  "arguments": {{"a":{n}}}}}\n</tool_call>'
                for n in range(choose.randint(1, self.most_calls))
            ]
            text += "\n" + "\n".join(written)
        was_cut = choose.random() < 0.2
        self.version += choose.random() < 0.1
        tokens = [token for character in text for token in self.encoder.tokens_of_rendered(character)]
        tokens += [] if was_cut else self.encoder.tokens_of_rendered(self.end)
        found = divided(text) if tools else SplitResponse(text)
        content, rest, calls = in_message(found)
        self.calls = [ToolCallMessage(Function(one.name, one.arguments), id=one.call_id) for one in calls]
        half = len(tokens) // 2
        ranges = [PolicyRange(self.version, 0, half)] if half else []
        self.version += choose.random() < 0.1  # a publication in its midst
        return RecordedAnswer(
            tokens=tuple(tokens),
            log_probs=tuple(-choose.random() - 1e-6 for _ in tokens),
            policy_ranges=(*ranges, PolicyRange(self.version, half, len(tokens))),
            status=Status.TRUNCATED if was_cut else Status.COMPLETED,
            content=content,
            rest=rest,
            end="" if was_cut else self.end,
        )


class Session:
    """An agent: it goes on, edits, forgets, asks twice, hands over to another, and leaves in the midst of an answer."""

    def __init__(self, encoder: PromptEncoder, end: str, seed: int) -> None:
        self.choose = random.Random(seed)
        self.policy = Policy(encoder, end, self.choose)
        if end == ENDS["llama3.1"]:
            self.policy.most_calls = 1  # its template refuses more
        self.encoder = encoder
        self.record = SessionRecord(encoder)
        self.asked: list[tuple[Ask, RecordedAnswer]] = []
        self.tools: list[Any] | None = TOOLS if self.choose.random() < 0.4 else None
        self.threads = [[Message("user", f"question {seed}")]]

    def play(self, turns: int) -> None:
        for _ in range(turns):
            self.turn(self.choose.choice(self.threads))

    def turn(self, thread: list[Message]) -> None:
        ask = self.record.ask(plain(thread), self.tools)
        if self.choose.random() < 0.1:
            return  # the client left, and was told nothing
        messages = []
        for _ in range(2 if self.choose.random() < 0.1 else 1):
            answer = self.policy.answer(ask, tools=self.tools is not None)
            message = Message("assistant", answer.content, tool_calls=self.policy.calls or None)
            self.record.add(ask, answer, message.for_template())
            self.asked.append((ask, answer))
            messages.append(message)
        self.go_on(thread, self.choose.choice(messages))

    def go_on(self, thread: list[Message], said: Message) -> None:
        dice = self.choose.random()
        if dice < 0.1:
            self.threads.append([Message("system", "You are another."), Message("user", said.text or "?")])
        if dice > 0.9:  # an editor's hand
            said = Message("assistant", said.text.strip().upper(), tool_calls=said.tool_calls)
        if 0.85 < dice < 0.9 and len(thread) > 2:
            del thread[: len(thread) - 2]
        thread.append(said)
        for call in said.tool_calls or ():
            thread.append(Message("tool", f"{self.choose.randint(0, 99)}", tool_call_id=call.id, name="add"))
        if not said.tool_calls:
            thread.append(Message("user", self.choose.choice(("and then?", "é\n", "go on"))))


def trained(branch: Branch) -> list[tuple[int, float]]:
    pairs = zip(branch.response, branch.log_probs, branch.loss_mask, strict=True)
    return [(token, log_prob) for token, log_prob, mask in pairs if mask]


def require_exact(session: Session) -> Sequence[Branch]:
    """Sampled tokens and log-probs equal those on record, each trained once, behind the tokens that the policy saw."""
    branches = session.record.branches()
    found = sorted(pair for branch in branches for pair in trained(branch))
    sampled = [pair for _, answer in session.asked for pair in zip(answer.tokens, answer.log_probs, strict=True)]
    assert found == sorted(sampled)  # log-probs are random numbers: they tell every token from every other
    wholes = [(*branch.prompt, *branch.response) for branch in branches]
    for ask, answer in session.asked:
        seen = (*ask.tokens, *answer.tokens)
        assert any(whole[: len(seen)] == seen for whole in wholes)
    for branch in branches:
        check_ranges("policy_ranges", branch.policy_ranges, len(branch.response))
        covered = {at for one in branch.policy_ranges if not one.masked for at in range(one.start, one.end)}
        assert covered == {at for at, mask in enumerate(branch.loss_mask) if mask}
    return branches


@dataclass(frozen=True)
class Model:
    name: str
    encoder: PromptEncoder

    @property
    def end(self) -> str:
        return ENDS[self.name]


@pytest.fixture(scope="module", params=sorted(ENDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_chat_tokenizer(request.param).save_pretrained(folder)
    return Model(request.param, PromptEncoder(folder, apply_chat_template=False))


def test_sampled_tokens_of_random_sessions_are_trained_once_as_they_were_sampled(model: Model) -> None:
    turns = branches = 0
    for seed in range(150):
        session = Session(model.encoder, model.end, seed)
        session.play(10)
        branches += len(require_exact(session))
        turns += len(session.asked)
    assert branches < turns  # some are continued


def test_a_conversation_that_only_grows_is_one_sample(model: Model) -> None:
    encoder, end = model.encoder, model.end
    session = Session(encoder, end, 0)
    session.tools = None
    thread = [Message("user", "2 + 2?")]
    for turn in range(4):
        ask = session.record.ask(plain(thread), None)
        text = f"turn {turn}"
        tokens = tuple(t for c in text for t in encoder.tokens_of_rendered(c)) + encoder.tokens_of_rendered(end)
        zeros = (-0.5,) * len(tokens)
        answer = RecordedAnswer(tokens, zeros, (PolicyRange(turn, 0, len(tokens)),), Status.COMPLETED, text, "", end)
        thread.append(Message("assistant", text))
        session.record.add(ask, answer, thread[-1].for_template())
        session.asked.append((ask, answer))
        thread.append(Message("user", "and?"))
        assert encoder.tokenizer.decode(ask.tokens, skip_special_tokens=False) == encoder.render(
            [m.for_template() for m in thread[:-2]], None
        )
    rewrites = model.name == "glm4.6"  # it writes an empty thought into every earlier turn
    assert len(require_exact(session)) == (4 if rewrites else 1)


def test_tool_calls_that_no_template_would_write_so_are_continued_as_they_were_sampled(tmp_path: Path) -> None:
    make_chat_tokenizer("qwen2.5").save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    record, sampled = SessionRecord(encoder), 'So:\n<tool_call>{"arguments":{"a":  1},"name":"add"}</tool_call>'
    thread = [Message("user", "1 + 1?")]
    ask = record.ask(plain(thread), TOOLS)
    tokens = encoder.tokens_of_rendered(f"{sampled}<|im_end|>")
    content, rest, calls = in_message(divided(sampled))
    assert (content, [(call.name, call.arguments) for call in calls]) == (
        "So:\n",
        [("add", '{"a": 1}')],
    )
    answer = RecordedAnswer(tokens, (-1.0,) * len(tokens), (), Status.COMPLETED, content, rest, "<|im_end|>")
    record.add(ask, answer, assistant_message("", content, [call.for_template() for call in calls]))
    renewed = [ToolCallMessage(Function(call.name, call.arguments), id="another") for call in calls]
    thread += [Message("assistant", content, tool_calls=renewed), Message("tool", "2", tool_call_id="another")]
    following = record.ask(plain(thread), TOOLS)
    assert following.tokens[: len(ask.tokens) + len(tokens)] == (*ask.tokens, *tokens)
    assert following.parent is not None


def test_a_call_is_the_same_however_its_arguments_are_written_and_another_with_other_arguments() -> None:
    def key(arguments: str, call_id: str) -> list[bytes]:
        call = ToolCallMessage(Function("add", arguments), id=call_id)
        return list(prefix_keys([Message("assistant", "So:", tool_calls=[call]).for_template()]))

    assert key('{"a":  1}', "first") == key('{"a":1}', "renewed")
    assert key('{"a": 1}', "first") != key('{"a": 2}', "first")


class OfCallsAlone:
    """A template that writes the calls of an assistant whom a tool answers, and nothing else that it said there."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        first: int = 0,
    ) -> str:
        followers = [*(message["role"] for message in messages[1:]), "assistant"]
        pairs = zip(messages, followers, strict=True)
        return "".join(f"{m.get('tool_calls') if after == 'tool' else m['content']};" for m, after in pairs)

    def tokens_of_rendered(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))


def test_where_the_template_does_not_write_an_answer_the_model_is_asked_with_what_it_does_write() -> None:
    record = SessionRecord(OfCallsAlone())
    thread: list[Any] = [Message("user", "1 + 1?").for_template()]
    for sampled in ("2", 'So:\n<tool_call>{"arguments":{"a":  1},"name":"add"}</tool_call>'):
        content, rest, calls = in_message(divided(sampled))
        ask = record.ask(thread, TOOLS)
        said = assistant_message("", content, [call.for_template() for call in calls])
        record.add(ask, RecordedAnswer((1,), (-1.0,), (), Status.COMPLETED, content, rest), said)
        thread += [said, (Message("tool", "2") if calls else Message("user", "sure?")).for_template()]
    written = OfCallsAlone().render(thread, TOOLS)
    assert "'arguments'" in written
    assert record.ask(thread, TOOLS).text == written
