"""The rules of a publication without engines: its plan, its end, checksums, its probe, and the bounds of its fields."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument
from headrace.publication import Probe, TensorSpec
from headrace.trajectory import pack_column
from services.rollout.engine.api import SamplingParams
from services.rollout.production.sampling import merged_params
from services.rollout.publication.plan import plan_from_proto
from services.rollout.publication.receiver import ask, differences, digest, slices
from services.rollout.publication.state import GroupPlan, Phase, Plan, PublicationState
from services.rollout.server import probe_from_proto, reward_target_from_proto
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
    class Client:
        async def score(self, tokens: Any, **_: Any) -> list[float]:
            return [float("nan")]

    class Engine:
        client, worker_type = Client(), "regular"

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


def begin(**changes: object) -> pb.BeginPublishRequest:
    request = pb.BeginPublishRequest(
        publication_id="p",
        policy_version=1,
        backend="gloo",
        deadline_seconds=5,
        manifest=pb.Manifest(tensors=[pb.TensorSpec(name="a", shape=[2], dtype="float32", bucket=0)]),
        groups=[pb.PublishGroup(name="g", master_address="127.0.0.1", master_port=1, buckets=[0])],
    )
    request.MergeFrom(pb.BeginPublishRequest(**changes))  # type: ignore[arg-type]
    return request


def test_a_request_becomes_a_plan_with_defaults() -> None:
    plan = plan_from_proto(begin())
    assert (plan.pause_mode, plan.deadline_seconds, list(plan.buckets)) == ("in_place", 5.0, [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": 9}, "transport 9 is not one of TRANSPORT_UNSPECIFIED, TRANSPORT_COLLECTIVE"),
        ({"transport": pb.TRANSPORT_DISK, "disk_path": "/w"}, r"one bucket, 0, .* not buckets \[0\] and 1 groups"),
        ({"transport": pb.TRANSPORT_DISK, "disk_path": "w"}, "disk_path 'w' is not absolute"),
        ({"disk_path": "/w"}, "disk_path is for"),
        ({"backend": "mpi"}, "backend 'mpi' is not one of gloo, nccl"),
        ({"deadline_seconds": -1.0}, "deadline_seconds is -1, must be 0 to 86400"),
        (
            {"manifest": pb.Manifest(tensors=[pb.TensorSpec(name="b", shape=[1], dtype="float32", bucket=3)])},
            r"the manifest has \[0, 3\]",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan_from_proto(begin(**changes))


def test_checksums_differ_by_value_by_absence_but_not_by_a_tied_head() -> None:
    rank = {"a": "1", "b": "2"}
    assert differences({"a": "1", "b": "2", "lm_head.weight": "1"}, [rank]) is None
    assert differences({"a": "1"}, [rank]) is None
    assert "first b: sent 3, engine has 2" in (differences({"b": "3"}, [rank]) or "")
    assert "the sender says nothing about a" in (differences({"b": "3"}, [rank]) or "")
    assert "the engine has no c" in (differences({"c": "1"}, [rank]) or "")
    assert digest([rank]) != digest([{**rank, "a": "2"}])


def commit(tokens: object = (1, 2, 3), log_probs: object = (-1.0, -2.0), tolerance: float = 0.1) -> Any:
    return pb.CommitPublishRequest(
        publication_id="p",
        probe=pb.Probe(
            tokens=pack_column("tokens", np.asarray(tokens)),
            log_probs=pack_column("log_probs", np.asarray(log_probs)),
            max_mean_difference=tolerance,
        ),
    )


def test_a_probe_is_read_and_one_that_cannot_be_is_refused() -> None:
    i, f = np.int32, np.float32
    probe = probe_from_proto(commit(np.asarray([1, 2, 3], i), np.asarray([-1, -2], f)))
    assert probe is not None
    assert (probe.tokens, probe.log_probs) == ((1, 2, 3), [-1.0, -2.0])
    assert probe_from_proto(pb.CommitPublishRequest(publication_id="p")) is None
    for tokens, log_probs, tolerance in (
        (np.asarray([1, 2, 3], np.int64), np.asarray([-1, -2], f), 0.1),
        (np.asarray([1, -2, 3], i), np.asarray([-1, -2], f), 0.1),
        (np.asarray([1, 2, 3], i), np.asarray([-1], f), 0.1),
        (np.asarray([1, 2, 3], i), np.asarray([-1, np.nan], f), 0.1),
        (np.asarray([1, 2, 3], i), np.asarray([-1, 2], f), 0.1),
        (np.asarray([1], i), np.asarray([], f), 0.1),
        (np.asarray([1, 2, 3], i), np.asarray([-1, -2], f), float("nan")),
        (np.zeros(5000, i), np.zeros(4999, f), 0.1),
    ):
        with pytest.raises(InvalidArgument):
            probe_from_proto(commit(tokens, log_probs, tolerance))


def tensor(**changes: Any) -> pb.Manifest:
    return pb.Manifest(tensors=[pb.TensorSpec(**{"name": "b", "shape": [1], "dtype": "float32"} | changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": 99},
        {"pause_mode": 99},
        {"backend": "x" * 100_000},
        {"publication_id": "x" * 600},
        {"policy_version": 2**53 + 1},
        {"epoch": 2**63 - 1},
        {"deadline_seconds": math.nan},
        {"deadline_seconds": 1e9},
        {"manifest": tensor(name="a")},
        {"manifest": tensor(name="a\nb")},
        {"manifest": tensor(shape=[0])},
        {"manifest": tensor(shape=[2**62, 2**62])},
        {"manifest": tensor(shape=[1] * 9)},
        {"manifest": tensor(dtype="float64")},
        {"manifest": tensor(bucket=2**32 - 1)},
        {"manifest": pb.Manifest(total_bytes=2**64 - 1)},
        {"groups": [pb.PublishGroup(name="g", master_address="h", master_port=1)]},
        {"groups": [pb.PublishGroup(name="h", master_address="h", master_port=70_000)]},
        {"groups": [pb.PublishGroup(name="h", master_address="h", master_port=1, buckets=[7])]},
        {"engine_ids": ["engine-0", "engine-0"]},
    ],
)
def test_every_field_of_a_publication_has_a_bound(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan_from_proto(begin(**changes))
    assert caught.value.field
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": 0},
        {"max_new_tokens": 2**32 - 1},
        {"stop": ["x" * 5_000]},
        {"stop": ["x"] * 2_000},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1] * 2_000},
        {"seed": 2**63 - 1},
    ],
)
def test_every_sampling_parameter_has_a_bound(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        merged_params(sample_pb2.SamplingParams(**sampling), SamplingParams(max_new_tokens=4))
    assert (caught.value.field or "").startswith("sampling.")


@pytest.mark.parametrize("address", ["", "host", "host:0", "h\0st:1", "x" * 600 + ":1"])
def test_a_reward_service_has_an_address(address: str) -> None:
    assert reward_target_from_proto(pb.SetRewardRequest(address="127.0.0.1:9000", scorer="")) == ("127.0.0.1:9000", "")
    with pytest.raises(InvalidArgument):
        reward_target_from_proto(pb.SetRewardRequest(address=address))
