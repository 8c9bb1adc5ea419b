"""Versions that fail their checks while engines already generate with them, from the engines to the ledger.

An engine whose weights are wrong says other tokens, so a token of a refused version is seen wherever it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.rollout import RolloutClient
from headrace.errors import ChecksumMismatch, PublicationAborted
from headrace.ledger_tools.audit_run import audit_ledger
from headrace.trajectory import Sample, unpack_column
from services.buffer.store.sqlite import SqliteStore
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import Generator
from services.rollout.production.groups import GroupSampler
from services.rollout.production.producer import BufferLedger, Producer
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import EngineSampler
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from services.rollout.scoring import SampleScorer
from services.rollout.server import RolloutServicer
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.fakes.fake_engine import VOCAB_SIZE, FakeEngine, next_token, response_to
from tests.support.fakes.fake_fleet import WIRE, FakeFleet, RememberedRouting, served_rollout
from tests.support.fakes.hostile_engine import TakingTurns
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.processes.buffer_server import served_buffer
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN
from tests.unit.rollout.publication.test_refused_weights import TRUTH

TOKENS = 60
NUM_GROUPS = 8
STEPS = 4


class FaultyEngine(FakeEngine):
    """Says other tokens while its weights are wrong, or while it computes something else with them."""

    def _next_token(self, context: Sequence[int]) -> int:
        is_wrong = self.log_prob_error != 0 or self.weights.get("a", WIRE["a"]) != WIRE["a"]
        return (next_token(context) + is_wrong) % VOCAB_SIZE


@dataclass
class Trainer:
    """Feeds steps, and publishes."""

    buffer: BufferClient
    receiver: Receiver
    record: TrainingRecord
    pause_mode: str
    epoch: int = 0

    async def step(self, number: int) -> None:
        reply = await self.buffer.lease_batch("train", self.epoch, number, timeout_seconds=30)
        self.record.append(number, Batch.of(reply))
        await self.buffer.consume("train", self.epoch, number, reply.digest)

    async def send(self, name: str, wrong: str, engines: Sequence[FaultyEngine]) -> None:
        """Version 1, up to its commit, with engines that go on with what they have."""
        groups = [GroupPlan(name, "127.0.0.1", 1, (0, 1))]
        plan = replace(PLAN, publication_id=name, policy_version=1, pause_mode=self.pause_mode, groups=groups)
        await self.receiver.begin(plan)
        await self.receiver.receive(name, 0)
        for engine in engines:
            if wrong == "bucket":
                engine.weights["a"] = "a flipped bit"
            if wrong == "probe":
                engine.log_prob_error = -5.0
        await self.receiver.receive(name, 1)

    async def commit(self, name: str) -> CommitResult:
        return await self.receiver.commit(name, CHECKSUMS, TRUTH)


class Outsider:
    """Asks the rollout service without end, as a client of its own."""

    def __init__(self, address: str) -> None:
        self.answers: list[tuple[list[int], set[int]]] = []
        self._asking = asyncio.create_task(self._ask(address))

    async def _ask(self, address: str) -> None:
        sampling = sample_pb2.SamplingParams(max_new_tokens=TOKENS)
        async with RolloutClient(address) as client:
            while True:
                tokens: list[int] = []
                versions: set[int] = set()
                async for reply in client.generate(
                    rollout_pb2.GenerateRequest(text="outside", return_tokens=True, sampling=sampling)
                ):
                    tokens += [int(token) for token in unpack_column(reply.tokens)]
                    versions |= {each.policy_version for each in reply.policy_ranges}
                self.answers.append((tokens, versions))

    async def leave(self) -> None:
        self._asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._asking


@dataclass
class Whole:
    """A rollout service of fake engines, a ledger on disk, and a client from outside."""

    fakes: FakeFleet
    trainer: Trainer
    outsider: Outsider
    encoder: PromptEncoder
    sampler: EngineSampler
    buffer_address: str

    @property
    def engines(self) -> list[FaultyEngine]:
        return [cast(FaultyEngine, self.fakes.fake(number)) for number in (0, 1)]

    async def all_held_back(self) -> None:
        """Returns when engines have said all they were asked, with weights that are not verified: nobody has it."""
        before = sum(engine.num_tokens for engine in self.engines)
        await self.fakes.until(
            lambda: (
                sum(engine.num_tokens for engine in self.engines) > before + TOKENS
                and not any(engine.num_in_flight for engine in self.engines)
                and self.sampler.in_flight > 0
            )
        )

    async def samples(self) -> list[Sample]:
        """Every sample that the ledger has."""
        groups = (await self.trainer.buffer.list_groups("train")).groups
        ids = [sample.sample_id for group in groups for sample in group.samples]
        return [Sample.unpack(each) for each in await self.trainer.buffer.fetch_samples("train", ids)]


@contextlib.asynccontextmanager
async def whole(folder: Path, pause_mode: str, *, num_groups: int = NUM_GROUPS) -> AsyncIterator[Whole]:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    encoder = PromptEncoder(folder / "tokenizer", apply_chat_template=False)
    routing = RememberedRouting()
    timing = FleetTiming(start_seconds=60, check_interval_seconds=0.02)
    fleet = Fleet(2, 1, lambda _: FaultyEngine(WIRE, token_seconds=0.001), routing, timing)
    await fleet.start()
    router = TakingTurns(routing)
    generator = Generator(router, fleet.weights, fleet.suspect)
    sampler = EngineSampler(generator, encoder, seconds=60.0)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fleet.stop)
        stack.push_async_callback(router.close)
        reward = await stack.enter_async_context(scripted_reward(score(0.5)))
        _, server = await stack.enter_async_context(served_buffer(SqliteStore(folder / "ledger")))
        buffer = await stack.enter_async_context(BufferClient(server.address))
        await buffer.create_stream(
            buffer_pb2.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=STEPS)
        )
        await buffer.submit_prompts("train", text_prompts(*(f"q{number}" for number in range(num_groups))))
        scorer = SampleScorer(reward.address, item_seconds=5.0, call_seconds=60.0, patience_seconds=60.0)
        stack.push_async_callback(scorer.close)
        groups = GroupSampler(
            encoder,
            sampler,
            scorer,
            SamplingParams(max_new_tokens=TOKENS),
            rollout_seed=42,
            max_prompt_tokens=None,
            context=None,
        )
        producer = Producer(
            BufferLedger(buffer, "train"),
            groups,
            lambda: fleet.policy_version,
            RolloutMetrics(CollectorRegistry()),
            max_groups_in_flight=3,
        )
        producer.start()
        stack.push_async_callback(producer.drain)

        def ask(prompt: EncodedPrompt, sampling: sample_pb2.SamplingParams, begun: Generation, adapter: str) -> Any:
            params = SamplingParams(max_new_tokens=sampling.max_new_tokens)
            return generator.stream(prompt.tokens, params, request_id="outside", seconds=60, begun=begun)

        slots = EngineSlots(Shares({Kind.CLIENTS: 64}), max_waiting=0)
        servicer = RolloutServicer(
            cast(Any, SimpleNamespace(encoder=encoder, ask=ask, slots=slots, adapter=nullcontext))
        )
        outsider = Outsider(await stack.enter_async_context(served_rollout(servicer)))
        stack.push_async_callback(outsider.leave)
        trainer = Trainer(buffer, Receiver(fleet), TrainingRecord(folder / "trained.jsonl"), pause_mode)
        trainer.epoch = (await buffer.rewind("train", 0)).epoch
        yield Whole(FakeFleet(fleet, routing), trainer, outsider, encoder, sampler, server.address)


@pytest.mark.parametrize("pause_mode", ["in_place", "retract", "abort"])
async def test_no_token_of_a_version_that_fails_its_checks_comes_to_the_ledger_or_to_a_client(
    pause_mode: str, tmp_path: Path
) -> None:
    async with whole(tmp_path, pause_mode) as run:
        trainer, fleet = run.trainer, run.fakes.fleet
        await trainer.step(0)
        for name, error in (("bucket", ChecksumMismatch), ("probe", PublicationAborted)):
            await trainer.send(name, name, run.engines)
            await run.all_held_back()
            with pytest.raises(error):
                await trainer.commit(name)
            await run.fakes.until(lambda: all(e.state is EngineState.READY for e in fleet.engines))
        await trainer.send("good", "nothing", run.engines)
        await run.all_held_back()
        await trainer.commit("good")
        await trainer.buffer.set_policy_version("train", trainer.epoch, 1)
        for step in range(1, STEPS):
            await trainer.step(step)
        samples = await run.samples()
        answers = run.outsider.answers
        audit = await audit_ledger(run.buffer_address, "train", tmp_path / "trained.jsonl", deep=True)

    assert len({sample.sample_id for sample in samples}) == len(samples) == 2 * NUM_GROUPS
    assert {r.policy_version for sample in samples for r in sample.policy_ranges} == {0, 1}
    for sample in samples:
        prompt = run.encoder.encode_text(sample.prompt).tokens
        assert sample.tokens.tolist() == [*prompt, *response_to(prompt, TOKENS)], "a token of a refused version"
    prompt = run.encoder.encode_text("outside").tokens
    assert all(tokens == response_to(prompt, TOKENS) for tokens, _ in answers), "a client was given one"
    assert set().union(*(versions for _, versions in answers)) <= {0, 1}
    assert answers
    verdict = audit.verdict
    assert (verdict.lost, verdict.doubled, verdict.unaccounted, verdict.others) == ([], [], [], [])
