"""The endpoint as the `openai` package sees it, before a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headrace.rpc.http_server import EndpointServer
from headrace.trajectory import check_sampling_mask
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.agents.endpoint import Endpoint
from services.rollout.agents.session import AgentPolicy, AgentSessions, Session, SessionLimits
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import SamplingMask
from services.rollout.engine.weights import INITIAL_VERSION, ServedWeights
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.models.chat_templates import make_chat_tokenizer

QUESTION: Any = [{"role": "user", "content": "2 + 2?"}]


@dataclass
class Served:
    url: str
    encoder: PromptEncoder
    sessions: AgentSessions
    engine: FakeEngine
    warnings: list[str]
    slots: EngineSlots

    def session(self, **limits: Any) -> Session:
        params = SamplingParams(max_new_tokens=8, seed=7)
        return self.sessions.open(params, SessionLimits(**{"seconds": 60.0, **limits}), self.warnings.append)

    def client(self, session: Session | None = None) -> openai.AsyncOpenAI:
        path = f"/sessions/{session.session_id}.first/v1" if session else "/v1"
        return openai.AsyncOpenAI(base_url=f"{self.url}{path}", api_key="any", max_retries=0, timeout=60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    make_chat_tokenizer("qwen2.5").save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    engine = FakeEngine(token_seconds=0.002)
    await engine.start(seconds=60)
    weights, client = ServedWeights(), EngineClient(engine.url)
    weights.accept([name := weights.new_name(INITIAL_VERSION, "engine-0")])
    await client.name_weights(name)
    sessions = AgentSessions(encoder, SamplingParams(max_new_tokens=16), SessionLimits(60.0))
    slots = EngineSlots(Shares({Kind.CLIENTS: 2}, alone=64), max_waiting=1)
    endpoint = Endpoint(
        sessions, AgentPolicy(Generator(client, weights), encoder, ToolCallReader(), slots), encoder, "tiny"
    )
    server = EndpointServer(endpoint.application())
    await server.start()
    yield Served(server.url, encoder, sessions, engine, [], slots)
    await server.stop()
    await client.close()
    await engine.stop()
    encoder.close()


async def test_what_the_client_is_told_is_what_the_engine_sampled(served: Served) -> None:
    session = served.session()
    async with served.client(session) as client:
        made = await client.chat.completions.create(model="any", messages=QUESTION, logprobs=True, max_tokens=5)
    (branch,) = session.record.branches()
    prompt = served.encoder.encode_messages([dict(each) for each in QUESTION], None).tokens
    assert branch.prompt == prompt
    assert list(branch.response) == response_to(prompt, 5)
    assert made.choices[0].message.content == served.encoder.decode_exactly(branch.response)
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].logprobs is not None
    assert [each.logprob for each in made.choices[0].logprobs.content or ()] == list(branch.log_probs)
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), 5)


async def test_a_stream_gives_the_same_text_and_is_recorded_once(served: Served) -> None:
    session = served.session()
    async with served.client(session) as client:
        stream = await client.chat.completions.create(
            model="any", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    (branch,) = session.record.branches()
    assert text == served.encoder.decode_exactly(branch.response)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("streams", [False, True])
async def test_a_session_records_the_sets_that_its_tokens_were_sampled_from(served: Served, streams: bool) -> None:
    session = served.session()
    session.params, session.mask_tokens = replace(session.params, top_p=0.9), 16
    async with served.client(session) as client:
        first = await client.completions.create(model="any", prompt="once", max_tokens=4)
        text = f"once{first.choices[0].text} more"
        if streams:
            pieces = await client.completions.create(model="any", prompt=text, max_tokens=4, stream=True)
            assert [piece async for piece in pieces]
        else:
            await client.completions.create(model="any", prompt=text, max_tokens=4)
    (branch,) = session.record.branches()
    assert branch.kept is not None
    sizes = [len(ids) for ids in branch.kept]
    assert sizes == [2 * trained for trained in branch.loss_mask]
    assert 0 in sizes
    check_sampling_mask("", np.array(branch.response), SamplingMask.of(branch.kept).columns)


async def test_tokens_that_an_agent_had_sampled_from_all_have_an_empty_set(served: Served) -> None:
    session = served.session()
    session.mask_tokens = 16
    async with served.client(session) as client:
        await client.completions.create(model="any", prompt="once", max_tokens=4)
    (branch,) = session.record.branches()
    assert branch.kept is not None
    assert SamplingMask.of(branch.kept).counts.tolist() == [0, 0, 0, 0]


async def test_choices_are_branches_and_completions_continue_texts(served: Served) -> None:
    session = served.session()
    async with served.client(session) as client:
        several = await client.chat.completions.create(model="any", messages=QUESTION, n=3)
        assert len(several.choices) == len(session.record.branches()) == 3
        first = await client.completions.create(model="any", prompt="once", max_tokens=4)
        await client.completions.create(model="any", prompt=f"once{first.choices[0].text} more", max_tokens=4)
    last = session.record.branches()[-1]
    assert sum(last.loss_mask) == 8


async def test_a_client_that_goes_away_ends_its_request_at_the_engine_and_leaves_no_record(served: Served) -> None:
    served.engine.token_seconds = 0.5
    for stream in (False, True):
        session = served.session()
        async with served.client(session) as client:
            asking = asyncio.create_task(_ask(client, stream))
            async with asyncio.timeout(60):
                while not served.engine.num_in_flight:  # another party's state
                    await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(60):
                while served.engine.num_in_flight:  # another party's state
                    await asyncio.sleep(0.01)
        assert session.record.branches() == []


async def _ask(client: openai.AsyncOpenAI, stream: bool) -> None:
    made: Any = await client.chat.completions.create(model="any", messages=QUESTION, stream=stream)
    if stream:
        async for _ in made:
            pass


async def test_limits_of_a_session_are_errors_that_say_so(served: Served) -> None:
    session = served.session(turns=1)
    async with served.client(session) as client:
        await client.chat.completions.create(model="any", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match=r"had its 1 turns \(--max-turns\): end here"):
            await client.chat.completions.create(model="any", messages=QUESTION)
    short = served.session(context=4)
    async with served.client(short) as client:
        with pytest.raises(openai.BadRequestError, match="rollout_max_context_len is 4") as refused:
            await client.chat.completions.create(model="any", messages=QUESTION)
    assert refused.value.code == "context_length_exceeded"
    assert (session.is_cut, short.is_cut) == (True, True)


async def test_a_session_that_is_over_answers_nobody_and_ends_who_still_asks(served: Served) -> None:
    session = served.session()
    served.engine.token_seconds = 0.5
    async with served.client(session) as client:
        asking = asyncio.create_task(_ask(client, stream=False))
        async with asyncio.timeout(60):
            while not served.engine.num_in_flight:  # another party's state
                await asyncio.sleep(0.01)
        await served.sessions.close(session)
        with pytest.raises(openai.NotFoundError, match="is over: its agent has ended"):
            await asking
        with pytest.raises(openai.NotFoundError, match="does not exist, or is over"):
            await client.chat.completions.create(model="any", messages=QUESTION)


async def test_an_agent_that_is_begun_again_begins_its_record_again(served: Served) -> None:
    session = served.session()
    async with served.client(session) as client:
        await client.chat.completions.create(model="any", messages=QUESTION)
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/sessions/{session.session_id}.second/v1", api_key="any"
    ) as client:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "another"}])
    (branch,) = session.record.branches()
    assert "another" in branch.prompt_text


async def test_temperature_is_the_jobs_in_a_session_and_the_clients_outside(served: Served) -> None:
    async with served.client(served.session()) as client:
        await client.chat.completions.create(model="any", messages=QUESTION, temperature=0.25)
    async with served.client() as client:
        await client.chat.completions.create(model="any", messages=QUESTION, temperature=0.25)
    assert [body["sampling_params"]["temperature"] for body in served.engine.bodies] == [1.0, 0.25]
    assert ["0.25" in warning and "--rollout-temperature 1" in warning for warning in served.warnings] == [True]


async def test_a_schema_and_stops_reach_the_engine_of_clients_and_no_recorded_session(served: Served) -> None:
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    session = served.session()
    async with served.client() as client, served.client(session) as recorded:
        asked: Any = {
            "model": "any",
            "messages": QUESTION,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            "stop": ["x", "yy"],
        }
        await client.chat.completions.create(**asked)
        with pytest.raises(openai.BadRequestError, match="what is trained is sampled freely"):
            await recorded.chat.completions.create(**asked)
    (body,) = served.engine.bodies
    params = body["sampling_params"]
    assert (params["json_schema"], params["stop"]) == (json.dumps(schema, separators=(",", ":")), ["x", "yy"])


async def test_clients_wait_for_slots_and_are_refused_with_429_when_too_many_do(served: Served) -> None:
    served.engine.token_seconds = 0.05
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        asking = [
            asyncio.create_task(http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream}))
            for stream in (False, True)
        ]
        async with asyncio.timeout(60):
            while served.engine.num_in_flight < 2:
                await asyncio.sleep(0.005)
        with served.slots.training(64):
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "stream": True}))
            async with asyncio.timeout(60):
                while not served.slots.shares.waiting(Kind.CLIENTS):
                    await asyncio.sleep(0.005)
            refused = await http.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert refused.headers["Retry-After"] == "5"
            waiting.cancel()
            async with asyncio.timeout(60):
                while served.slots.shares.waiting(Kind.CLIENTS):
                    await asyncio.sleep(0.005)
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
    assert served.slots.shares.in_use(Kind.CLIENTS) == 0


async def test_routes_models_and_large_bodies(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await http.get("/v1/nothing")).status_code == 404
        assert (await http.get("/v1/chat/completions")).status_code == 405
        assert (await http.get("/sessions/unknown/v1/models")).status_code == 404
        refused = await http.post("/v1/completions", content=b" " * (40 << 20))
        assert "may have 16,777,216" in refused.json()["error"]["message"]
