"""Engines go on with the last bucket; their weights are checked beside requests, and served once they are."""

from __future__ import annotations

from dataclasses import replace

from headrace.publication import TensorSpec
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from tests.support.fake_weights import fake_checksum
from tests.support.fakes.fake_fleet import FakeFleet
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, publish

BIG_C = [TensorSpec("c", (25 << 20,), "float32")]


async def test_engines_go_on_once_they_have_the_last_bucket_and_are_checked_beside_it(fakes: FakeFleet) -> None:
    receiver = Receiver(fakes.fleet)
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


async def test_a_large_model_is_checked_in_slices_so_that_requests_go_on_between_them(fakes: FakeFleet) -> None:
    receiver = Receiver(fakes.fleet)
    large = replace(PLAN, buckets={0: [TensorSpec("a", (25 << 20,), "float32"), *PLAN.buckets[0][1:]], 1: BIG_C})
    assert await publish(receiver, large) == ("engine-0", "engine-1")
    assert fakes.fake(0).calls.count("/weights_checker") == 3
    again = replace(large, publication_id="p2", policy_version=4, groups=[GroupPlan("h", "127.0.0.1", 2, (0, 1))])
    await receiver.begin(again)
    for bucket in (0, 1):
        await receiver.receive("p2", bucket)
    fakes.fake(0).weights["c"] = "a flipped bit, in the last slice"
    assert (await receiver.commit("p2", CHECKSUMS)).engine_ids == ("engine-1",)


async def test_a_tensor_whose_name_contains_another_slices_is_checked_too(fakes: FakeFleet) -> None:
    receiver = Receiver(fakes.fleet)
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


async def test_a_slice_of_which_an_engine_has_nothing_is_no_bad_answer(fakes: FakeFleet) -> None:
    """With tied embeddings an engine has no lm_head, though it is sent."""
    receiver = Receiver(fakes.fleet)
    await receiver.begin(replace(PLAN, buckets={**PLAN.buckets, 1: BIG_C}))
    for bucket in (0, 1):
        await receiver.receive("p1", bucket)
    for number in (0, 1):
        del fakes.fake(number).weights["c"]
    expected = {name: checksum for name, checksum in CHECKSUMS.items() if name != "c"}
    assert (await receiver.commit("p1", expected)).lost_engine_ids == ()
