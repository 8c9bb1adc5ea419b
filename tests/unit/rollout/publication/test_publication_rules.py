"""The rules of a publication by themselves: its plan, its end, its groups, its checksums and its probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from headrace.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument
from headrace.publication import Probe, TensorSpec
from services.rollout.publication.receiver import ask, differences, slices
from services.rollout.publication.state import GroupPlan, Phase, Plan, PublicationState
from tests.unit.rollout.publication.test_receiver import PLAN


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"buckets": {}, "groups": []}, "groups"),
        ({"groups": [GroupPlan("g", "127.0.0.1", 1, (0,))]}, "groups"),
        ({"publication_id": ""}, "publication_id"),
        *(({"deadline_seconds": seconds}, "deadline_seconds") for seconds in (0.0, -1.0, float("nan"))),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replace(PLAN, **changes)
    assert caught.value.field == field


def test_what_is_committed_is_neither_open_nor_aborted_any_more() -> None:
    state = PublicationState(PLAN, ("engine-0",), received=set(PLAN.buckets))
    state.commit()
    with pytest.raises(FailedPrecondition, match="is committed already"):
        state.require_open()
    assert not state.abort("too late")
    assert state.phase is Phase.COMMITTED


def test_what_was_aborted_keeps_its_first_reason() -> None:
    state = PublicationState(PLAN, ("engine-0",))
    assert state.abort("first")
    assert not state.abort("second")
    assert state.why_aborted == "first"


def test_an_engine_that_lacks_a_tensor_is_told_from_one_with_tied_embeddings() -> None:
    sent = {"a": "1", "lm_head.weight": "2"}
    assert differences(sent, [{"a": "1"}]) is None
    assert "the engine has no a" in (differences(sent, [{"lm_head.weight": "2"}]) or "")


async def test_a_probe_that_is_not_a_number_disagrees() -> None:
    class Engine:
        async def score(self, tokens: Any, **_: Any) -> list[float]:
            return [float("nan")]

    with pytest.raises(ChecksumMismatch):
        await ask(Probe([1, 2], [-0.5], 0.5), cast(Any, Engine()), 3, seconds=1)


def test_a_probe_has_a_log_prob_for_every_token_but_the_first() -> None:
    with pytest.raises(InvalidArgument, match="needs two tokens or more"):
        Probe([1, 2, 3], [-0.5], 0.5)


def test_checksums_of_fp8_are_asked_for_at_once_because_engines_hash_it_in_every_slice() -> None:
    def plan(dtype: str) -> Plan:
        tensors = [TensorSpec(f"l.{layer}.mlp.weight", (8 << 20, 16), dtype) for layer in range(4)]
        return replace(PLAN, buckets={0: tensors}, groups=[GroupPlan("g", "127.0.0.1", 1, (0,))])

    assert len(slices(plan("bfloat16"))) == 4
    assert slices(plan("float8_e4m3fn")) == [[]]
