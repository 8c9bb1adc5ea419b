"""The endpoint before a policy that says what it is told to, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace.rpc.http_server import EndpointServer
from headrace.trajectory import PolicyRange
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.agents.endpoint import Endpoint
from services.rollout.agents.session import AgentPolicy, AgentSessions, Session, SessionLimits
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.prompts import PromptEncoder
from tests.support.models.chat_templates import make_chat_tokenizer

USER = {"role": "user", "content": "hi"}


@dataclass
class Script:
    """A policy that says what it is told to."""

    encoder: PromptEncoder
    end: str = "<|im_end|>"
    says: str | Callable[[str], str] = "ok"
    """The response, or how it follows from the prompt's text."""
    fails_after: int | None = None
    """The number of tokens of a stream behind which the engine is gone."""
    prompts: list[str] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    generations: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)

    async def generate(self, prompt: Any, params: SamplingParams, **_: Any) -> Generation:
        self.prompts.append(self.encoder.decode_exactly(list(prompt)))
        self.params.append(params.for_engine())
        said = self.says if isinstance(self.says, str) else self.says(self.prompts[-1])
        stops = [position for stop in params.stop if (position := said.find(stop)) >= 0]
        text = f"{said}{self.end}" if not stops else said[: min(stops)] + next(s for s in params.stop if s in said)
        tokens = self.encoder.tokens_of_rendered(text)[: params.max_new_tokens]
        number = len(self.generations)
        log_probs = tuple(-(number + place / 4096 + 1e-6) for place in range(len(tokens)))  # none is like another
        finish = Finish.LENGTH if len(tokens) == params.max_new_tokens else Finish.STOP
        made = Generation(tokens, log_probs, finish, (PolicyRange(0, 0, len(tokens)),))
        self.generations.append((tuple(prompt), made))
        return made

    async def stream(self, prompt: Any, params: SamplingParams, **_: Any) -> AsyncIterator[Generation]:
        whole = await self.generate(prompt, params)
        for count in range(1, len(whole.tokens)):
            if count == self.fails_after:
                raise ConnectionError("the engine is gone")
            yield Generation(whole.tokens[:count], whole.log_probs[:count], None, (PolicyRange(0, 0, count),))
            await asyncio.sleep(0)
        yield whole


@dataclass
class Served:
    script: Script
    http: httpx.AsyncClient
    session: str
    opened: Session

    @property
    def url(self) -> str:
        """Where a client of the recorded session asks, without /v1."""
        return f"{str(self.http.base_url).rstrip('/')}/sessions/{self.session}.first"

    async def ask(self, *, recorded: bool = True, **body: Any) -> httpx.Response:
        path = "chat/completions"
        return await self.post(path, {"model": "m", "messages": [USER], **body}, recorded=recorded)

    async def post(
        self, path: str, body: Any, *, recorded: bool = True, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        url = f"{self.url}/v1/{path}" if recorded else f"/v1/{path}"
        return await self.http.post(url, json=body, headers=headers)


@asynccontextmanager
async def serving(
    folder: Path, name: str, *, end: str = "<|im_end|>", max_new_tokens: int = 4096
) -> AsyncIterator[Served]:
    make_chat_tokenizer(name).save_pretrained(folder)
    encoder = PromptEncoder(folder, apply_chat_template=False)
    script: Any = Script(encoder, end)
    sessions = AgentSessions(encoder, SamplingParams(max_new_tokens=max_new_tokens), SessionLimits(60.0))
    slots = EngineSlots(Shares({Kind.CLIENTS: 8}, alone=64), max_waiting=8)
    endpoint = Endpoint(sessions, AgentPolicy(script, encoder, ToolCallReader(), slots), encoder, "tiny")
    server = EndpointServer(endpoint.application())
    await server.start()
    session = sessions.open(SamplingParams(max_new_tokens=max_new_tokens, seed=1), SessionLimits(60.0), lambda _: None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        yield Served(script, http, session.session_id, session)
    await server.stop()
    encoder.close()


async def serve(folder: Path, name: str) -> AsyncIterator[Served]:
    """The same for a fixture."""
    async with serving(folder, name) as served:
        yield served
