"""An engine that answers badly, in some seventy ways, beside a good one: nothing of it reaches the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidArgument
from headrace.rpc.net import free_port
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.replies import BadAnswer
from services.rollout.engine.weights import ServedWeights
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import Generator
from services.rollout.production.groups import GroupSampler
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler
from services.rollout.scoring import SampleScorer
from tests.support.fakes.fake_engine import VOCAB_SIZE, mask_of, response_to
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.hostile_engine import HOSTILE, NUM_TOKENS, Hostile, HostileEngine, TakingTurns
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import ScriptedReward, score, scripted_reward
from tests.support.models.tiny_model import make_tiny_tokenizer

GROUPS = 4
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS)
PROMPT = (1, 2, 3)
ONE_OF_A_KIND = {hostile.kind: name for name, hostile in HOSTILE.items()}.values()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return PromptEncoder(folder, apply_chat_template=False)


@pytest.fixture
async def reward() -> AsyncIterator[ScriptedReward]:
    async with scripted_reward(score(1.0)) as reward:
        yield reward


@dataclass
class Attacked:
    fleet: Fleet
    ledger: MemoryLedger
    registry: CollectorRegistry

    def counted(self, kind: str) -> float:
        return self.registry.get_sample_value("headrace_rollout_bad_answers_total", {"kind": kind}) or 0.0


@contextlib.asynccontextmanager
async def attacked(hostile: Hostile, encoder: PromptEncoder, reward: ScriptedReward) -> AsyncIterator[Attacked]:
    """Production with two engines, one of them hostile; where it is started again, a good one comes."""
    started: list[HostileEngine] = []

    def build(number: int) -> HostileEngine:
        started.append(HostileEngine(hostile if number == 0 and len(started) < 2 else None))
        return started[-1]

    registry, routing = CollectorRegistry(), RememberedRouting()
    metrics = RolloutMetrics(registry)
    timing = FleetTiming(start_seconds=60, check_interval_seconds=0.01, check_timeout_seconds=5.0)
    fleet = Fleet(2, 1, build, routing, timing, metrics)
    await fleet.start()
    router = TakingTurns(routing, vocab_size=VOCAB_SIZE)
    scorer = SampleScorer(reward.address, item_seconds=1.0)
    sampler = EngineSampler(Generator(router, fleet.weights, fleet.suspect), encoder, seconds=60.0)
    groups = GroupSampler(encoder, sampler, scorer, PARAMS, rollout_seed=1, max_prompt_tokens=None, context=None)
    ledger = MemoryLedger([lease(number) for number in range(GROUPS)])
    producer = Producer(ledger, groups, lambda: fleet.policy_version, metrics, max_groups_in_flight=GROUPS)
    producer.start()
    try:
        yield Attacked(fleet, ledger, registry)
    finally:
        await producer.drain()
        await scorer.close()
        await router.close()
        await fleet.stop()


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
async def test_nothing_of_a_bad_answer_reaches_the_ledger_and_the_run_goes_on(
    name: str, encoder: PromptEncoder, reward: ScriptedReward
) -> None:
    hostile = HOSTILE[name]
    async with attacked(hostile, encoder, reward) as run:
        async with asyncio.timeout(60):
            while len(run.ledger.puts) < GROUPS:  # another party's work
                await asyncio.sleep(0.005)
            if hostile.kind:
                while run.fleet.engines[0].restarts == 0:
                    await asyncio.sleep(0.005)
        counted = run.counted(hostile.kind)
    assert run.ledger.released == []
    assert {put.outcome for put in run.ledger.puts} == {buffer_pb2.PUT_OUTCOME_COMPLETE}
    whole = [*encoder.encode_text("hello").tokens]
    whole += response_to(whole, NUM_TOKENS)
    samples = [Sample.unpack(packed) for put in run.ledger.puts for packed in put.samples]
    good = [sample for sample in samples if sample.status is not Status.FAILED]
    assert good
    for sample in good:
        assert sample.tokens.tolist() == whole
        assert sample.rollout_log_probs.round(3).tolist() == pytest.approx(
            [-(token % 7 + 1) / 10 for token in whole[-NUM_TOKENS:]], abs=1e-3
        )
        assert [(r.policy_version, r.start, r.end) for r in sample.policy_ranges] == [(0, 0, NUM_TOKENS)]
    refused = [sample.failure.reason for sample in samples if sample.failure]
    assert set(refused) <= ({"ENGINE_REFUSED"} if hostile.kind == "refused" else set())
    assert counted > 0 if hostile.kind else run.counted("") == 0


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - ONE_OF_A_KIND))
async def test_a_bad_answer_of_the_same_kind_is_no_answer(name: str) -> None:
    async with asked_alone(HOSTILE[name]) as client:
        with pytest.raises(HeadraceError) as caught:
            await Generator(client, ServedWeights()).generate(PROMPT, PARAMS, request_id="r", seconds=0.5)
    if isinstance(caught.value, BadAnswer):
        assert caught.value.kind == HOSTILE[name].kind


@pytest.mark.parametrize(
    ("value", "reason"),
    [(99_999, "experts from"), (None, "bytes for"), ("%", "base64")],
)
async def test_experts_that_cannot_be_are_a_bad_answer(value: int | str | None, reason: str) -> None:
    def spoil(reply: dict[str, object]) -> dict[str, object]:
        rows = 5 if value is None else len(PROMPT) + NUM_TOKENS - 1
        data = (value if isinstance(value, int) else 0).to_bytes(4, "little", signed=True) * rows
        meta = reply["meta_info"]
        assert isinstance(meta, dict)
        meta["routed_experts"] = value if isinstance(value, str) else base64(data)
        return reply

    async with asked_alone(Hostile("routed_experts", spoil), routed_experts=True) as client:
        with pytest.raises(BadAnswer, match=reason) as caught:
            await client.generate(PROMPT, PARAMS, request_id="r", cache_key="", seconds=30)
    assert caught.value.kind == "routed_experts"


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_sampling_mask": None},
        {"output_token_sampling_mask": [[]]},
        {"output_token_sampling_mask": [[VOCAB_SIZE]]},
        {"output_token_sampling_mask": [[-1]]},
        {"output_token_sampling_mask": [[1 << 40]]},
        {"output_token_sampling_logprobs": [0.5]},
        {"output_token_sampling_logprobs": [None]},
        {"output_token_sampling_logprobs": []},
    ],
    ids=str,
)
async def test_a_sampling_mask_that_cannot_be_is_a_bad_answer(meta: dict[str, object]) -> None:
    def spoil(reply: dict[str, object]) -> dict[str, object]:
        found, tokens = reply["meta_info"], reply["output_ids"]
        assert isinstance(found, dict)
        assert isinstance(tokens, list)
        found |= mask_of(tokens)
        for name, values in meta.items():
            found[name] = values and values + found[name][1:]  # type: ignore[operator]
        return reply

    async with asked_alone(Hostile("sampling_mask", spoil)) as client:
        with pytest.raises(BadAnswer) as caught:
            await client.generate(PROMPT, PARAMS, request_id="r", cache_key="", seconds=30, sampling_mask=True)
    assert caught.value.kind in {"sampling_mask", "output_token_sampling_mask", "log_prob"}


async def test_an_answer_that_drips_ends_at_the_deadline_of_the_whole_request() -> None:
    async with asked_alone(HOSTILE["closed"]) as client:
        drip = await asyncio.start_server(dripping, "127.0.0.1", free_port())
        async with drip, EngineClient(f"http://127.0.0.1:{drip.sockets[0].getsockname()[1]}") as slow:
            for work in (
                slow.generate(PROMPT, PARAMS, request_id="r", cache_key="", seconds=0.3),
                slow.weights_name(seconds=0.3),
                slow.score(PROMPT, cache_key="", seconds=0.3),
                anext(slow.stream(PROMPT, PARAMS, request_id="r", cache_key="", seconds=0.3)),
            ):
                async with asyncio.timeout(60):
                    with pytest.raises(DeadlineExceeded):
                        await work
        with pytest.raises(HeadraceError):
            await client.generate(PROMPT, PARAMS, request_id="r", cache_key="", seconds=30)


async def test_a_request_that_the_engine_refuses_fails_at_once_with_its_message() -> None:
    finish = {"type": "abort", "message": "The input (5000 tokens) exceeds the maximum length.", "status_code": 400}

    def spoil(reply: dict[str, object]) -> dict[str, object]:
        reply["output_ids"], reply["meta_info"] = [], {"finish_reason": finish, "weight_version": "0"}
        return reply

    async with asked_alone(Hostile("", spoil)) as client:
        generator = Generator(client, ServedWeights())
        with pytest.raises(InvalidArgument, match="5000 tokens"):
            await generator.generate(PROMPT, PARAMS, request_id="r", seconds=60)


async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"    ")
            await writer.drain()
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def asked_alone(hostile: Hostile, *, routed_experts: bool = False) -> AsyncIterator[EngineClient]:
    engine = HostileEngine(hostile)
    await engine.start(seconds=60)
    async with EngineClient(engine.url, routed_experts=routed_experts, vocab_size=VOCAB_SIZE) as client:
        yield client
    await engine.stop()


def base64(data: bytes) -> str:
    from base64 import b64encode

    return b64encode(data).decode()
