"""Random sessions in each dialect: every sampled token is trained once, as it was sampled, however a client asks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.session import Ask, SessionRecord
from headrace.trajectory import PolicyRange, check_ranges
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.agents.session import AgentPolicy, Session, SessionLimits
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.prompts import PromptEncoder
from tests.long_forms import ALL
from tests.support.dialect_clients import CLIENTS, Client, Thread
from tests.support.models.chat_templates import make_chat_tokenizer

ENDS = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama3.1": "<|eot_id|>",
    "glm4.6": "<|user|>",
    "deepseek_v3.1": "<｜end▁of▁sentence｜>",
    "kimi_k2": "<|im_end|>",
    "deepseek_r1_distill_qwen": "<｜end▁of▁sentence｜>",  # its prompts open a thought
}
SEEDS = range(130) if ALL else range(8)  # 1,040 sessions a dialect, or 64
TURNS = 8
WORDS = ("the", "answer", "is", " 42", "é", "\n", "  ", "ü💧", "{", "so,", "<b", "</")


@dataclass
class Engine:
    """Says something to each request; its tokens are the text's characters, as no tokenizer would divide it."""

    encoder: PromptEncoder
    end: str
    choose: random.Random
    most_calls: int
    calls_tools: bool = False
    always_thinks: bool = False
    version: int = 0
    sampled: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)

    def text(self, prompt: str) -> str:
        choose = self.choose
        said = "".join(choose.choices(WORDS, k=choose.randint(0, 6)))
        thought = "".join(choose.choices(WORDS, k=3))
        if prompt.rstrip().endswith("<think>"):
            said = f"{thought}\n</think>\n\n{said}"
        elif self.always_thinks or choose.random() < 0.4:
            end = "</think>" if self.always_thinks else choose.choice(("</think>", ""))
            said = f"{choose.choice(('', chr(10)))}<think>\n{thought}\n{end}\n\n{said}"
        if self.calls_tools and choose.random() < 0.5:
            number = choose.choice(("1", "2.0", "1e2"))
            call = f'<tool_call>\n{{"name":"add",  "arguments": {{"a":{number}}}}}\n</tool_call>\n'
            said += "\n" + call * choose.randint(1, self.most_calls)
        return said

    async def generate(self, prompt: Any, params: SamplingParams, **_: Any) -> Generation:
        text = self.text(self.encoder.decode_exactly(list(prompt)))
        was_cut = self.choose.random() < 0.2
        tokens = [token for character in text for token in self.encoder.tokens_of_rendered(character)]
        end = "<|observation|>" if self.end == ENDS["glm4.6"] and "<tool_call>" in text else self.end
        tokens += self.encoder.tokens_of_rendered("" if was_cut and tokens else end)
        self.version += self.choose.random() < 0.1
        half = len(tokens) // 2
        ranges = [PolicyRange(self.version, 0, half)] if half else []
        self.version += self.choose.random() < 0.1  # a publication in its midst
        log_probs = tuple(-self.choose.random() - 1e-6 for _ in tokens)  # they tell every token from every other
        finish = Finish.LENGTH if was_cut else Finish.STOP
        made = Generation(tuple(tokens), log_probs, finish, (*ranges, PolicyRange(self.version, half, len(tokens))))
        self.sampled.append((tuple(prompt), made))
        return made


class Agent:
    """It goes on, edits, forgets, asks twice, hands over to another, and leaves in the midst of a response."""

    def __init__(self, encoder: PromptEncoder, name: str, dialect: str, seed: int) -> None:
        self.choose = random.Random(seed)
        self.client: Client = CLIENTS[dialect](self.choose)
        self.client.has_tools = bool(self.client.tools) and self.choose.random() < 0.5
        self.encoder = encoder
        self.engine = Engine(encoder, ENDS[name], self.choose, 1 if name == "llama3.1" else 2)
        self.engine.calls_tools = self.client.has_tools
        generator: Any = self.engine
        slots = EngineSlots(Shares({Kind.CLIENTS: 8}, alone=64), max_waiting=8)
        self.policy = AgentPolicy(generator, encoder, ToolCallReader(), slots)
        self.session = Session("s", SessionRecord(encoder), SamplingParams(max_new_tokens=4096), SessionLimits(600.0))
        self.threads: list[Thread] = [self.client.user(f"question {seed}")]

    async def turn(self) -> None:
        thread = self.choose.choice(self.threads)
        streams = self.choose.random() < 0.5
        n = {"n": 2} if self.client.has_choices and not streams and self.choose.random() < 0.1 else {}
        exchange = self.client.read(thread, self.session.kept, stream=streams, **n)
        ask = await self.policy.ask(self.session, exchange.asked)
        if self.choose.random() < 0.1:
            return  # the client left, and was told nothing
        body = await self._streamed(exchange, ask) if streams else None
        if body is None:
            replies = await self.policy.replies(self.session, exchange.asked, ask)
            body = exchange.body(replies, len(ask.tokens))
        self._go_on(thread, self.client.said(body))

    async def _streamed(self, exchange: Any, ask: Ask) -> Any:
        generation = await self.engine.generate(ask.tokens, self.session.params)
        reply = await self.policy.record(self.session, exchange.asked, ask, generation)
        events = exchange.begin(len(ask.tokens))
        for part in (0.3, 0.7):
            thought = reply.thought[: int(part * 2 * len(reply.thought))]
            is_whole = thought == reply.thought
            events += exchange.progress(thought, reply.text[: int(part * len(reply.text))] if is_whole else "")
        return self.client.told(events + exchange.end(reply, len(ask.tokens)))

    def _go_on(self, thread: Thread, said: Thread) -> None:
        dice = self.choose.random()
        if dice < 0.1:  # a sub-agent
            self.threads.append([*self.client.system("You are another."), *self.client.user(f"{dice}")])
        if dice > 0.9:
            said = self.client.edited(said)
        if 0.85 < dice < 0.9:  # compaction
            thread[:] = self.client.user(f"in short, {dice}")
        thread += said
        thread += self.client.results(said) or self.client.user(self.choose.choice(("and then?", "é\n", "go on")))


def require_exact(agent: Agent) -> int:
    """Sampled tokens and log-probs equal those on record, each trained once, behind the tokens that the policy saw."""
    branches = agent.session.record.branches()
    trained = [
        (token, log_prob)
        for branch in branches
        for token, log_prob, mask in zip(branch.response, branch.log_probs, branch.loss_mask, strict=True)
        if mask
    ]
    sampled = [pair for _, made in agent.engine.sampled for pair in zip(made.tokens, made.log_probs, strict=True)]
    assert sorted(trained) == sorted(sampled)
    wholes = [(*branch.prompt, *branch.response) for branch in branches]
    for prompt, made in agent.engine.sampled:
        seen = (*prompt, *made.tokens)
        assert any(whole[: len(seen)] == seen for whole in wholes)
    for branch in branches:
        check_ranges("policy_ranges", branch.policy_ranges, len(branch.response))
        covered = {at for one in branch.policy_ranges if not one.masked for at in range(one.start, one.end)}
        assert covered == {at for at, mask in enumerate(branch.loss_mask) if mask}
    return len(branches)


@pytest.fixture(scope="module", params=sorted(ENDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PromptEncoder]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_chat_tokenizer(request.param).save_pretrained(folder)
    return request.param, PromptEncoder(folder, apply_chat_template=False)


@pytest.mark.parametrize("dialect", sorted(CLIENTS))
async def test_sampled_tokens_of_random_sessions_are_trained_once_as_they_were_sampled(
    model: tuple[str, PromptEncoder], dialect: str
) -> None:
    name, encoder = model
    branches = requests = 0
    for seed in SEEDS:
        agent = Agent(encoder, name, dialect, seed)
        for _ in range(TURNS):
            await agent.turn()
        branches += require_exact(agent)
        requests += len(agent.engine.sampled)
    rewrites = name == "glm4.6" and dialect == "chat"  # it writes an empty thought into every earlier turn
    assert branches < requests or rewrites


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_thoughts_and_calls_that_come_back_continue_their_tokens_whatever_the_template_makes_of_them(
    model: tuple[str, PromptEncoder], dialect: str
) -> None:
    name, encoder = model
    for seed in range(4):
        agent = Agent(encoder, name, dialect, seed)
        agent.engine.always_thinks = True
        (thread,) = agent.threads
        for number in range(4):
            exchange = agent.client.read(thread, agent.session.kept)
            ask = await agent.policy.ask(agent.session, exchange.asked)
            replies = await agent.policy.replies(agent.session, exchange.asked, ask)
            said = agent.client.said(exchange.body(replies, len(ask.tokens)))
            thread += said + (agent.client.results(said) or agent.client.user(f"and {number}?"))
        assert require_exact(agent) == 1
