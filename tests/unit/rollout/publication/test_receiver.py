"""Publications into fake engines, and every way in which one can fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.errors import (
    ChecksumMismatch,
    FailedPrecondition,
    Fenced,
    GroupGone,
    InvalidArgument,
    PublicationAborted,
)
from headrace.job.engine_shape import EngineShape
from headrace.publication import Probe, TensorSpec
from services.rollout.engine.fleet import Engine, EngineSlot, EngineState, Fleet, FleetTiming
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from tests.support.fake_weights import fake_checksum
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, FakeFleet, RememberedRouting

CHECKSUMS = {name: fake_checksum(content) for name, content in WIRE.items()}
PLAN = Plan(
    publication_id="p1",
    epoch=1,
    policy_version=3,
    pause_mode="in_place",
    backend="gloo",
    deadline_seconds=600.0,
    buckets={
        0: [TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32")],
        1: [TensorSpec("c", (), "float32")],
    },
    groups=[GroupPlan("g", "127.0.0.1", 1, (0, 1))],
)


async def test_a_group_is_used_again_while_the_engines_are_the_same(fakes: FakeFleet, receiver: Receiver) -> None:
    await publish(receiver, PLAN)
    joined = replace(PLAN, publication_id="p2", policy_version=4, groups=[replace(PLAN.groups[0], joined=True)])
    assert await publish(receiver, joined) == ("engine-0", "engine-1")
    assert fakes.fake(0).calls.count("/init_weights_update_group") == 1


async def test_a_group_that_the_sender_left_is_joined_again(fakes: FakeFleet, receiver: Receiver) -> None:
    await publish(receiver, PLAN)
    await publish(receiver, replace(PLAN, publication_id="p2", policy_version=4))
    joins = [call for call in fakes.fake(0).calls if "weights_update_group" in call]
    init, destroy = "/init_weights_update_group", "/destroy_weights_update_group"
    assert joins == [init, destroy, init]


async def test_a_joined_group_of_other_engines_is_refused_before_any_engine_notices(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    joined = replace(PLAN, publication_id="p2", policy_version=4, groups=[replace(PLAN.groups[0], joined=True)])
    with pytest.raises(GroupGone, match=r"groups \['g'\] have other members"):
        await receiver.begin(joined)  # a rollout service that started again knows no group
    await publish(receiver, PLAN)
    fakes.fake(1).die()
    await fakes.until(lambda: fakes.fleet.engines[1].state is EngineState.STALE)
    calls = list(fakes.fake(0).calls)
    with pytest.raises(GroupGone, match=r"begin with new groups"):
        await receiver.begin(joined)
    assert receiver.open_id == ""
    assert [call for call in fakes.fake(0).calls[len(calls) :] if call != "/model_info"] == []
    renewed = replace(joined, groups=[GroupPlan("h", "127.0.0.1", 2, (0, 1))])
    assert await publish(receiver, renewed) == ("engine-0", "engine-1")
    assert fakes.fake(0).groups == {"h"}


async def test_a_group_that_engines_left_at_an_abort_is_not_used_again(fakes: FakeFleet, receiver: Receiver) -> None:
    await publish(receiver, PLAN)
    joined = replace(PLAN, publication_id="p2", policy_version=4, groups=[replace(PLAN.groups[0], joined=True)])
    await receiver.begin(joined)
    await receiver.abort("p2", "no")
    with pytest.raises(GroupGone):
        await receiver.begin(replace(joined, publication_id="p3"))


async def test_every_call_may_be_repeated(fakes: FakeFleet, receiver: Receiver) -> None:
    assert await receiver.begin(PLAN) == await receiver.begin(PLAN)
    await asyncio.gather(receiver.receive("p1", 0), receiver.receive("p1", 0))
    await receiver.receive("p1", 1)
    assert fakes.fake(0).calls.count("/update_weights_from_distributed") == 2
    assert await receiver.commit("p1", CHECKSUMS) == await receiver.commit("p1", CHECKSUMS)
    await receiver.abort("p1", "too late to matter")
    assert [e.state for e in fakes.fleet.engines] == [EngineState.READY, EngineState.READY]


async def test_a_commit_before_all_buckets_is_refused_and_the_publication_goes_on(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await receiver.begin(PLAN)
    await receiver.receive("p1", 0)
    with pytest.raises(FailedPrecondition, match=r"lacks buckets \[1\]"):
        await receiver.commit("p1", CHECKSUMS)
    await receiver.receive("p1", 1)
    assert (await receiver.commit("p1", CHECKSUMS)).lost_engine_ids == ()


async def test_an_engine_that_dies_at_the_commit_does_not_stop_the_other(fakes: FakeFleet, receiver: Receiver) -> None:
    fakes.fake(0).faults["/weights_checker"] = "die"
    assert await publish(receiver, PLAN) == ("engine-1",)
    assert fakes.fleet.policy_version == 3


async def test_without_the_senders_checksums_engines_are_compared_with_each_other(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await send(receiver)
    fakes.fake(0).weights["a"] = "a flipped bit"
    with pytest.raises(ChecksumMismatch, match="engines differ from each other"):
        await receiver.commit("p1", {})
    assert fakes.fleet.policy_version == 0
    assert EngineState.STALE not in [e.state for e in fakes.fleet.engines], "nobody knows which of them is right"
    await fakes.until(lambda: [e.restarts for e in fakes.fleet.engines] == [1, 1])


async def test_when_all_engines_fail_the_publication_is_aborted(fakes: FakeFleet, receiver: Receiver) -> None:
    for number in (0, 1):
        fakes.fake(number).faults["/update_weights_from_distributed"] = "die"
    await receiver.begin(PLAN)
    with pytest.raises(PublicationAborted, match="no engine remains"):
        await receiver.receive("p1", 0)
    with pytest.raises(PublicationAborted):
        await receiver.receive("p1", 1)
    await fakes.until(lambda: [e.state for e in fakes.fleet.engines] == [EngineState.READY, EngineState.READY])
    assert [e.restarts for e in fakes.fleet.engines] == [1, 1]


async def test_untouched_engines_go_on_after_an_abort(fakes: FakeFleet, receiver: Receiver) -> None:
    await receiver.begin(PLAN)
    await fakes.until(lambda: all("/begin_weight_update" in fakes.fake(n).calls for n in (0, 1)))
    await receiver.abort("p1", "the trainer changed its mind")
    assert [(e.state, e.restarts) for e in fakes.fleet.engines] == [(EngineState.READY, 0)] * 2
    assert fakes.fake(0).calls[-1] == "/continue_generation"
    with pytest.raises(PublicationAborted, match="changed its mind"):
        await receiver.receive("p1", 0)


async def test_touched_engines_wait_for_the_next_publication_after_an_abort(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await publish(receiver, PLAN)
    await receiver.begin(replace(PLAN, publication_id="p2", policy_version=4))
    await receiver.receive("p2", 0)
    await receiver.abort("p2", "no")
    assert fakes.routing.urls == set()
    assert [(e.state, e.restarts, e.weights_digest) for e in fakes.fleet.engines] == [(EngineState.STALE, 0, "")] * 2
    assert fakes.fake(0).calls[-1] == "/end_weight_update", "paused: requests in flight go on with the next weights"
    again = replace(PLAN, publication_id="p3", policy_version=4, groups=[GroupPlan("h", "127.0.0.1", 2, (0, 1))])
    assert await publish(receiver, again) == ("engine-0", "engine-1")
    assert fakes.fake(0).groups == {"h"}


async def test_when_one_dies_in_a_broadcast_the_other_is_kept_for_the_next_publication(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    fakes.fake(0).faults["/update_weights_from_distributed"] = "refuse"  # as when the sender leaves the group
    fakes.fake(1).faults["/update_weights_from_distributed"] = "die"
    await receiver.begin(PLAN)
    with pytest.raises(PublicationAborted, match="engines lost in a collective.*engine-1"):
        await receiver.receive("p1", 0)
    fakes.fake(0).faults.clear()
    again = replace(PLAN, publication_id="p2", groups=[GroupPlan("h", "127.0.0.1", 2, (0, 1))])
    assert "engine-0" in await publish(receiver, again)
    await fakes.until(lambda: [engine.restarts for engine in fakes.fleet.engines] == [0, 1])


async def test_a_publication_past_its_deadline_aborts_itself(fakes: FakeFleet, receiver: Receiver) -> None:
    await receiver.begin(replace(PLAN, deadline_seconds=0.2))
    await fakes.until(lambda: receiver.open_id == "")
    with pytest.raises(PublicationAborted, match=r"not committed within 0\.2 s"):
        await receiver.receive("p1", 0)
    await fakes.until(lambda: [e.state for e in fakes.fleet.engines] == [EngineState.READY] * 2)


async def test_an_older_epoch_is_fenced_and_a_newer_one_takes_over(fakes: FakeFleet, receiver: Receiver) -> None:
    await receiver.begin(replace(PLAN, epoch=2))
    with pytest.raises(Fenced, match="epoch 1 is over: epoch 2 has begun"):
        await receiver.begin(replace(PLAN, publication_id="p0", epoch=1))
    with pytest.raises(FailedPrecondition, match="publication p1 is open"):
        await receiver.begin(replace(PLAN, publication_id="p2", epoch=2))
    assert (await receiver.begin(replace(PLAN, publication_id="p3", epoch=3))).engine_ids == ("engine-0", "engine-1")


async def send(receiver: Receiver, plan: Plan = PLAN) -> None:
    """Up to its commit."""
    await receiver.begin(plan)
    for bucket in plan.buckets:
        await receiver.receive(plan.publication_id, bucket)


async def publish(receiver: Receiver, plan: Plan) -> tuple[str, ...]:
    await send(receiver, plan)
    return (await receiver.commit(plan.publication_id, CHECKSUMS)).engine_ids


async def test_only_engines_that_wait_for_the_served_version_are_given_it_alone(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await publish(receiver, PLAN)
    with pytest.raises(FailedPrecondition, match=r"\['engine-1'\] do not wait for weights"):
        await receiver.begin(replace(PLAN, publication_id="p2", engine_ids=("engine-1",)))
    with pytest.raises(FailedPrecondition, match="version 4 for .* alone, but 3 is served"):
        await receiver.begin(replace(PLAN, publication_id="p3", policy_version=4, engine_ids=("engine-1",)))


async def test_an_engine_that_computes_something_else_with_the_same_weights_is_taken_out(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    tokens = (5, 6, 7)
    await send(receiver)
    fakes.fake(1).log_prob_error = 0.3
    truth = [-(token % 7 + 1) / 10 for token in tokens[1:]]
    committed = await receiver.commit("p1", CHECKSUMS, Probe(tokens, truth, max_mean_difference=0.2))
    assert (committed.engine_ids, committed.lost_engine_ids) == (("engine-0",), ("engine-1",))


async def test_both_engines_of_divided_requests_get_the_weights_and_the_one_with_prompts_the_probe() -> None:
    parts = ("prefill", "decode")

    def slot(number: int) -> EngineSlot:
        return EngineSlot(EngineShape(1), parts[number], parts[number])

    timing, tokens = FleetTiming(check_interval_seconds=0.05), (5, 6, 7)
    fleet = Fleet(2, slot, lambda number: FakeEngine(WIRE, part=parts[number]), RememberedRouting(), timing)
    await fleet.start()
    receiver = Receiver(fleet)
    await send(receiver)
    truth = [-(token % 7 + 1) / 10 for token in tokens[1:]]
    committed = await receiver.commit("p1", CHECKSUMS, Probe(tokens, truth, max_mean_difference=1e-6))
    assert committed.engine_ids == ("engine-0", "engine-1")
    prefill, decode = (e.process.bodies for e in fleet.engines if isinstance(e.process, FakeEngine))
    assert [body["bootstrap_host"] for body in prefill] == ["2.2.2.2"]
    assert not decode
    await fleet.stop()


async def test_a_probe_that_all_engines_fail_ends_the_publication_and_the_old_version_stays(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await send(receiver)
    with pytest.raises(PublicationAborted, match=r"probe's log-probs differ by 5 in the mean, more than 0\.2"):
        await receiver.commit("p1", CHECKSUMS, Probe((1, 7), [-5.1], max_mean_difference=0.2))
    assert fakes.fleet.policy_version == 0


@pytest.mark.parametrize("wrong", [0, 1])
async def test_after_an_abort_during_the_verification_no_engine_is_asked_about_the_probe(
    wrong: int, fakes: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may leave while an engine with other weights is ended. The other engine is ended a little later."""
    receiver, give_up = Receiver(fakes.fleet), fakes.fleet.give_up
    aborts: list[asyncio.Task[None]] = []
    refused = asyncio.Event()

    async def aborted_meanwhile(engine: Engine, why: str) -> None:
        if not aborts:
            aborts.append(asyncio.create_task(receiver.abort("p1", "the trainer went away")))
            await fakes.until(lambda: receiver.open_id == "")
        elif engine is fakes.fleet.engines[1 - wrong]:
            await refused.wait()
        await give_up(engine, why)

    monkeypatch.setattr(fakes.fleet, "give_up", aborted_meanwhile)
    await send(receiver)
    fakes.fake(wrong).weights["a"] = "a flipped bit"
    other = fakes.fake(1 - wrong)
    with pytest.raises(PublicationAborted, match="the trainer went away"):
        await receiver.commit("p1", CHECKSUMS, Probe((1, 7), [-0.1], max_mean_difference=0.2))
    refused.set()
    await aborts[0]
    assert "/generate" not in other.calls
    assert fakes.fleet.policy_version == 0


BIG_C = [TensorSpec("c", (25 << 20,), "float32")]


async def test_engines_go_on_once_they_have_the_last_bucket_and_are_checked_beside_it(
    fakes: FakeFleet, receiver: Receiver
) -> None:
    await receiver.begin(PLAN)
    await receiver.receive("p1", 0)
    assert "/continue_generation" not in fakes.fake(0).calls, "it holds a mixture"
    await receiver.receive("p1", 1)
    for number in (0, 1):
        assert fakes.fake(number).calls[-1] == "/continue_generation"
        assert "/weights_checker" not in fakes.fake(number).calls
    assert fakes.fleet.policy_version == 0, "nothing is served unchecked"
    await receiver.commit("p1", CHECKSUMS)
    assert fakes.fake(0).calls.count("/continue_generation") == 1


async def test_a_tensor_whose_name_contains_another_slices_is_checked_too(fakes: FakeFleet, receiver: Receiver) -> None:
    contained = "c.a"  # whoever leaves out "a" leaves it out, too
    for number in (0, 1):
        fakes.fake(number).weights[contained] = "content"
    await receiver.begin(
        replace(PLAN, buckets={0: [TensorSpec("a", (25 << 20,), "float32"), *PLAN.buckets[0][1:]], 1: BIG_C})
    )
    for bucket in (0, 1):
        await receiver.receive("p1", bucket)
    fakes.fake(0).weights[contained] = "a flipped bit"
    committed = await receiver.commit("p1", CHECKSUMS | {contained: fake_checksum("content")})
    assert committed.engine_ids == ("engine-1",)


LOADED = replace(PLAN, publication_id="p0", policy_version=0, groups=[], is_loaded=True)


def load(fakes: FakeFleet, **others: str) -> None:
    for number in (0, 1):
        fakes.fake(number).weights = {**WIRE, **others}


async def test_engines_that_loaded_the_weights_serve_them_without_standing_still(fakes: FakeFleet) -> None:
    load(fakes)
    receiver = Receiver(fakes.fleet)
    assert (await receiver.begin(LOADED)).engine_ids == ("engine-0", "engine-1")
    committed = await receiver.commit("p0", CHECKSUMS)
    assert committed.engine_ids == ("engine-0", "engine-1")
    assert committed.paused_seconds == 0.0
    assert committed.weights_digest == fakes.fleet.engines[1].weights_digest != ""
    assert all(engine.state is EngineState.READY for engine in fakes.fleet.engines)
    calls = {call for number in (0, 1) for call in fakes.fake(number).calls}
    assert "/weights_checker" in calls
    assert calls.isdisjoint({"/pause_generation", "/init_weights_update_group", "/begin_weight_update"})


async def test_engines_that_loaded_others_go_on_as_before_and_get_them(fakes: FakeFleet) -> None:
    load(fakes, b="a quantized b")
    receiver = Receiver(fakes.fleet)
    await receiver.begin(LOADED)
    with pytest.raises(ChecksumMismatch, match="2 of 3|1 of 3"):
        await receiver.commit("p0", CHECKSUMS)
    await fakes.until(lambda: all(engine.state is EngineState.READY for engine in fakes.fleet.engines))
    assert [engine.restarts for engine in fakes.fleet.engines] == [0, 0]
    assert await publish(receiver, replace(PLAN, policy_version=0)) == ("engine-0", "engine-1")


async def test_engines_that_were_given_weights_are_refused(fakes: FakeFleet, receiver: Receiver) -> None:
    await publish(receiver, PLAN)
    with pytest.raises(FailedPrecondition, match="hold other weights than those that they loaded"):
        await receiver.begin(replace(LOADED, epoch=2))
    assert all(engine.state is EngineState.READY for engine in fakes.fleet.engines)


async def test_nothing_travels(fakes: FakeFleet) -> None:
    load(fakes)
    receiver = Receiver(fakes.fleet)
    await receiver.begin(LOADED)
    with pytest.raises(InvalidArgument, match="commit them"):
        await receiver.receive("p0", 0)
    await receiver.commit("p0", CHECKSUMS)
    for contradiction in ({"groups": PLAN.groups}, {"engine_ids": ("engine-0",)}):
        with pytest.raises(InvalidArgument, match="belong to no group"):
            replace(LOADED, **contradiction)  # type: ignore[arg-type]
