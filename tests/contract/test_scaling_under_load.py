"""The fleet grows and shrinks while producers fill a real ledger and versions are published: no sample is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import GroupGone
from headrace.ledger_tools.audit_run import audit_ledger
from services.rollout.engine.fleet import EngineState
from services.rollout.engine.scaling import Capacity, Scaler
from services.rollout.publication.publication import Members
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from tests.support.fakes.fake_engine import response_to
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN
from tests.unit.rollout.publication.test_verify_then_serve import TOKENS, Whole, whole

NUM_GROUPS, GROUPS_PER_STEP = 24, 2


class Publisher:
    """As the trainer's: it uses its group again while its engines are the same, and renews it when they are not."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.groups = [GroupPlan("group-0", "127.0.0.1", 1, (0, 1))]
        self.members: Members | None = None
        self.num_renewed = 0

    async def begin(self, name: str, version: int, *alone: str) -> None:
        plan = replace(PLAN, publication_id=name, policy_version=version, groups=self.groups, engine_ids=alone)
        try:
            self.members = await self._receiver.begin(plan)
        except GroupGone:
            self.num_renewed += 1
            self.groups = [GroupPlan(f"group-{self.num_renewed}", "127.0.0.1", 1, (0, 1))]
            self.members = await self._receiver.begin(replace(plan, groups=self.groups))

    async def finish(self, name: str) -> None:
        for bucket in (0, 1):
            await self._receiver.receive(name, bucket)
        await self._receiver.commit(name, CHECKSUMS)
        self.groups = [replace(group, joined=True) for group in self.groups]


async def settled(run: Whole, num_engines: int) -> None:
    serving = (EngineState.READY, EngineState.STALE)
    await run.fakes.until(
        lambda: len(run.fakes.fleet.engines) == num_engines and all(e.state in serving for e in run.fakes.fleet.engines)
    )


@pytest.mark.parametrize("drain_seconds", [0.0, 60.0])
async def test_no_sample_is_lost_while_engines_come_and_go(tmp_path: Path, drain_seconds: float) -> None:
    async with whole(tmp_path, "in_place", num_groups=NUM_GROUPS) as run:
        fleet, trainer = run.fakes.fleet, run.trainer
        scaler, publisher = Scaler(fleet, Capacity(most=3)), Publisher(trainer.receiver)

        async def step_with(version: int, step: int) -> None:
            await publisher.finish(f"v{version}")
            await trainer.buffer.set_policy_version("train", trainer.epoch, version)
            await trainer.step(step)

        await trainer.step(0)
        for step, num_engines in enumerate((1, 3, 1, 3, 2), 1):
            await publisher.begin(f"v{step}", step)
            taking_part = set(publisher.members.engine_ids) if publisher.members else set()
            await scaler.scale(num_engines, drain_seconds=drain_seconds)
            assert all(e.state is EngineState.UPDATING for e in fleet.engines if e.engine_id in taking_part)
            await step_with(step, step)
            await settled(run, num_engines)
            if waiting := [e.engine_id for e in fleet.engines if e.state is EngineState.STALE]:
                await publisher.begin(f"v{step}-alone", step, *waiting)
                await publisher.finish(f"v{step}-alone")
            assert {e.state for e in fleet.engines} == {EngineState.READY}
            assert run.fakes.routing.urls == {e.url for e in fleet.engines}
        for step in range(6, NUM_GROUPS // GROUPS_PER_STEP):
            await publisher.begin(f"v{step}", step)
            await step_with(step, step)
        await run.outsider.leave()
        samples = await run.samples()
        answers = run.outsider.answers
        audit = await audit_ledger(run.buffer_address, "train", tmp_path / "trained.jsonl", deep=True)
        await scaler.stop()

    assert publisher.num_renewed > 0
    assert len({sample.sample_id for sample in samples}) == len(samples) == 2 * NUM_GROUPS
    for sample in samples:
        prompt = run.encoder.encode_text(sample.prompt).tokens
        assert sample.tokens.tolist() == [*prompt, *response_to(prompt, TOKENS)]
    prompt = run.encoder.encode_text("outside").tokens
    assert answers
    assert all(tokens == response_to(prompt, TOKENS) for tokens, _ in answers)
    verdict = audit.verdict
    assert (verdict.lost, verdict.doubled, verdict.unaccounted, verdict.others) == ([], [], [], [])
