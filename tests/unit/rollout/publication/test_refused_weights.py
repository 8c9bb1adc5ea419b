"""Tokens of weights that were refused, or that are not judged yet: none of them leaves the rollout service."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from headrace.errors import PublicationAborted
from headrace.publication import Probe
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import WIRE, FakeFleet, RememberedRouting
from tests.support.fakes.hostile_engine import TakingTurns
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, send

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_new_tokens=12)
LONG = SamplingParams(max_new_tokens=200)
TRUTH = Probe((5, 6, 7), [-(token % 7 + 1) / 10 for token in (6, 7)], max_mean_difference=0.2)


class SlowToAnswerProbes(FakeEngine):
    """Generates while it thinks about a probe, until `may_answer` is set."""

    may_answer = asyncio.Event()
    probes = 0

    async def _generate(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        if "logprob_start_len" in body:
            type(self).probes += 1
            await self.may_answer.wait()
        return await super()._generate(request, body)


class Attempts:
    """Two engines, requests that go to both, and publications whose probe waits for the test."""

    def __init__(self) -> None:
        self.may_answer = SlowToAnswerProbes.may_answer = asyncio.Event()
        SlowToAnswerProbes.probes = 0
        self.routing = RememberedRouting()
        timing = FleetTiming(start_seconds=60, check_interval_seconds=0.02)
        self.fleet = Fleet(2, 1, lambda _: SlowToAnswerProbes(WIRE, token_seconds=0.001), self.routing, timing)
        self.fakes = FakeFleet(self.fleet, self.routing)
        self.receiver = Receiver(self.fleet)
        self.router = TakingTurns(self.routing)
        self.generator = Generator(self.router, self.fleet.weights, self.fleet.suspect)

    async def __aenter__(self) -> Attempts:
        await self.fleet.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may_answer.set()
        await self.router.close()
        await self.fleet.stop()

    async def begin(self, name: str) -> asyncio.Task[CommitResult]:
        """Version 3, up to its commit; returns when the engines have been asked about the probe."""
        plan = replace(PLAN, publication_id=name, groups=[GroupPlan(name, "127.0.0.1", 1, (0, 1))])
        probes = SlowToAnswerProbes.probes
        await self.receiver.begin(plan)
        for bucket in (0, 1):
            await self.receiver.receive(name, bucket)
        commit = asyncio.create_task(self.receiver.commit(name, CHECKSUMS, TRUTH))
        await self.fakes.until(lambda: SlowToAnswerProbes.probes == probes + 2)
        return commit

    async def requests(self) -> list[asyncio.Task[Generation]]:
        """Four, whose tokens are all made before this returns."""
        before = sum(self.fakes.fake(number).num_tokens for number in (0, 1))
        asked = [
            asyncio.create_task(self.generator.generate(PROMPT, PARAMS, request_id=f"{before}-{n}", seconds=60))
            for n in range(4)
        ]
        await self.fakes.until(lambda: sum(self.fakes.fake(n).num_tokens for n in (0, 1)) >= before + 4 * 12)
        return asked


async def test_what_refused_weights_made_is_made_again_and_the_next_attempt_is_not_taken_for_it() -> None:
    async with Attempts() as attempts:
        refused = await attempts.begin("p1")
        asked = await attempts.requests()
        names = [engine.weights_name for engine in attempts.fleet.engines]
        for number in (0, 1):
            attempts.fakes.fake(number).log_prob_error = -5.0
        attempts.may_answer.set()
        with pytest.raises(PublicationAborted, match="probe's log-probs differ"):
            await refused
        await attempts.fakes.until(lambda: all(e.state is EngineState.READY for e in attempts.fleet.engines))
        for generation in await asyncio.gather(*asked):
            assert list(generation.tokens) == response_to(PROMPT, 12)
            assert {r.policy_version for r in generation.policy_ranges} == {0}

        attempts.may_answer.clear()
        again = await attempts.begin("p2")
        asked = await attempts.requests()
        attempts.may_answer.set()
        await again
        assert {r.policy_version for g in await asyncio.gather(*asked) for r in g.policy_ranges} == {3}
        assert [await attempts.fleet.weights.version_of(name) for name in names] == [None, None], "for good"
        assert not {engine.weights_name for engine in attempts.fleet.engines} & set(names)


async def test_an_engine_that_fails_the_probe_beside_one_that_passes_it_takes_its_tokens_with_it() -> None:
    async with Attempts() as attempts:
        commit = await attempts.begin("p1")
        asked = await attempts.requests()
        bad, good = attempts.fleet.engines
        name = bad.weights_name
        attempts.fakes.fake(0).log_prob_error = -5.0
        attempts.may_answer.set()
        assert (await commit).engine_ids == (good.engine_id,)
        assert await attempts.fleet.weights.version_of(name) is None
        assert {r.policy_version for g in await asyncio.gather(*asked) for r in g.policy_ranges} == {3}
        assert attempts.fakes.fake(1).num_tokens > 2 * 12, "what the bad one had made was made again by the other"


async def test_engines_that_went_on_are_paused_again_where_nobody_commits(fakes: FakeFleet) -> None:
    receiver, weights = Receiver(fakes.fleet), fakes.fleet.weights
    await send(receiver)
    names = [engine.weights_name for engine in fakes.fleet.engines]
    await receiver.abort("p1", "the trainer went away before its commit")
    assert [await weights.version_of(name) for name in names] == [None, None]
    assert fakes.routing.urls == set()
    assert [(e.state, e.restarts) for e in fakes.fleet.engines] == [(EngineState.STALE, 0)] * 2
    calls = fakes.fake(0).calls
    assert calls[::-1].index("/pause_generation") < calls[::-1].index("/continue_generation")


async def test_requests_that_refused_weights_worked_on_end_there_and_go_on_with_others() -> None:
    """What such weights left of a request in the engine's memory is not used again."""
    async with Attempts() as attempts:
        await send(attempts.receiver)
        asked = [
            asyncio.create_task(attempts.generator.generate(PROMPT, LONG, request_id=f"long-{n}", seconds=60))
            for n in range(4)
        ]
        await attempts.fakes.until(lambda: all(attempts.fakes.fake(n).num_in_flight for n in (0, 1)))
        await attempts.receiver.abort("p1", "the trainer went away before its commit")
        await attempts.fakes.until(lambda: not any(attempts.fakes.fake(n).num_in_flight for n in (0, 1)))
        commit = await attempts.begin("p2")
        attempts.may_answer.set()
        await commit
        for generation in await asyncio.gather(*asked):
            assert list(generation.tokens) == response_to(PROMPT, LONG.max_new_tokens)
            assert {r.policy_version for r in generation.policy_ranges} == {3}


async def test_prefixes_of_weights_that_are_not_accepted_yet_are_kept_apart() -> None:
    async with Attempts() as attempts:
        fakes = [attempts.fakes.fake(number) for number in (0, 1)]

        def keys() -> set[str]:
            return {key for fake in fakes for key in fake.cache_keys if not key.startswith("probe")}

        await asyncio.gather(*await attempts.requests())
        assert keys() == {"v0"}
        await send(attempts.receiver)
        asked = await attempts.requests()
        (first,) = keys() - {"v0"}
        await attempts.receiver.abort("p1", "the trainer went away before its commit")
        attempts.may_answer.set()
        for name in ("p2", "p3"):
            await (await attempts.begin(name))
            await asyncio.gather(*asked, *await attempts.requests())
        assert len(keys() - {"v0", first}) == 2, "and of each attempt at the same version"


async def test_an_engine_that_starts_again_after_its_checks_is_not_taken_for_one_that_passed_them() -> None:
    async with Attempts() as attempts:
        passed = attempts.fakes.fake(0)
        assert isinstance(passed, SlowToAnswerProbes)
        passed.may_answer = asyncio.Event()
        passed.may_answer.set()
        commit = await attempts.begin("p1")
        await attempts.fakes.until(lambda: not passed.num_in_flight)
        passed.die()
        again, other = attempts.fleet.engines
        await attempts.fakes.until(lambda: again.restarts == 1 and again.state is EngineState.READY)
        attempts.may_answer.set()
        committed = await commit
        assert (committed.engine_ids, committed.lost_engine_ids) == ((other.engine_id,), (again.engine_id,))
        assert (again.state, again.policy_version) == (EngineState.STALE, 0)
        assert attempts.routing.urls == {other.url}


async def test_a_mixture_does_not_come_back_into_routing_by_an_attempt_that_brings_nothing(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await send(receiver)
    await receiver.commit("p1", CHECKSUMS)
    await receiver.begin(replace(PLAN, publication_id="p2", policy_version=4))
    await receiver.receive("p2", 0)
    await receiver.abort("p2", "in the middle")
    await receiver.begin(replace(PLAN, publication_id="p3", policy_version=4))
    await receiver.abort("p3", "before the first bucket")
    assert fakes.routing.urls == set()
    assert [engine.state for engine in fakes.fleet.engines] == [EngineState.STALE] * 2


async def test_initial_weights_are_not_served_after_a_trainer_published_its_own_under_their_number(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await send(receiver, replace(PLAN, policy_version=0))
    await receiver.commit("p1", CHECKSUMS)
    fakes.fake(0).die()
    await fakes.until(
        lambda: fakes.fleet.engines[0].restarts == 1 and fakes.fleet.engines[0].state is EngineState.STALE
    )
    assert fakes.routing.urls == {fakes.fleet.engines[1].url}
