"""What no sample may hold, by the three ways in: a hook's sample, one that is built, bytes that are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.api.reward.v1 import reward_pb2
from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of
from headrace.errors import InvalidArgument
from headrace.hooks import Sample as HookSample
from headrace.hooks import from_hook
from headrace.limits import MAX_JSON_DEPTH, from_json, require_json_object, to_json
from headrace.score import ScoreError, unpack_result
from headrace.trajectory import (
    Failure,
    ModelBounds,
    PolicyRange,
    Sample,
    Status,
    check_experts,
    check_loss_mask,
    check_ranges,
    check_row,
    gaps,
    pack_column,
    unpack_column,
)
from tests.support.refusals import refused

NESTED: dict[str, Any] = {}
for _ in range(MAX_JSON_DEPTH - 1):
    NESTED = {"a": NESTED}


def hook_sample(**changes: Any) -> HookSample:
    """Five tokens, three of them the response."""
    fields: dict[str, Any] = {
        "prompt": "q",
        "response": "a",
        "tokens": [1, 2, 3, 4, 5],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -1.5],
        "weight_versions": ["0"],
        "status": HookSample.Status.COMPLETED,
    }
    return HookSample(**fields | changes)


def converted(sample: HookSample) -> Sample:
    return from_hook(sample, sample_id="s", group_id="g", index=0)


BAD_HOOK_SAMPLES: dict[str, dict[str, Any]] = {
    "mask too short": {"loss_mask": [1, 1]},
    "mask of two dimensions": {"loss_mask": [[1], [1], [1]]},
    "mask of a half": {"loss_mask": [1, 0.5, 1]},
    "mask of two": {"loss_mask": [1, 2, 1]},
    "mask of 256, which is 0 in uint8": {"loss_mask": [1, 256, 1]},
    "mask of NaN": {"loss_mask": [1, math.nan, 1]},
    "tokens of two dimensions": {"tokens": [[1, 2], [3, 4], [5, 6]]},
    "tokens as float32": {"tokens": np.ones(5, np.float32)},
    "tokens absent": {"tokens": None},
    "a token below zero": {"tokens": [1, 2, -3, 4, 5]},
    "tokens above int32": {"tokens": [1, 2, 1 << 31, 4, 5]},
    "fewer tokens than the response": {"response_length": 6},
    "response length as a truth": {"response_length": True, "loss_mask": [1], "rollout_log_probs": [-1.0]},
    "log-probs absent": {"rollout_log_probs": None},
    "log-probs too few": {"rollout_log_probs": [-0.5, -0.5]},
    "log-probs of NaN": {"rollout_log_probs": [-0.5, math.nan, -0.5]},
    "log-probs of nothing that was sampled": {"rollout_log_probs": [-0.5, -1e30, -0.5]},
    "log-probs above zero": {"rollout_log_probs": [-0.5, 0.5, -0.5]},
    "teacher's log-probs of another length": {"teacher_log_probs": [-0.5]},
    "experts that wrap in int16": {"rollout_routed_experts": np.full((4, 2, 2), 99_999)},
    "experts below -1": {"rollout_routed_experts": np.full((4, 2, 2), -2)},
    "experts of two dimensions": {"rollout_routed_experts": np.zeros((4, 2), np.int16)},
    "experts of another number of tokens": {"rollout_routed_experts": np.zeros((5, 2, 2), np.int16)},
    "a set without its token": {"rollout_sampling_mask": [[3], [9], [5]]},
    "sets of another number of tokens": {"rollout_sampling_mask": [[3], [4]]},
    "a set of words": {"rollout_sampling_mask": [["a"], [4], [5]]},
    "a set with an id below zero": {"rollout_sampling_mask": [[3, -1], [4], [5]]},
    "status as a word": {"status": "completed"},
    "response that is no text": {"response": b"a"},
    "prompt that is no conversation": {"prompt": [{"role": "user"}]},
    "label with a set": {"label": {7}},
    "metadata that is no dict": {"metadata": ["a"]},
    "metadata with a set": {"metadata": {"a": {1}}},
    "metadata too deep": {"metadata": {"a": NESTED}},
    "train metadata with an array": {"train_metadata": {"a": np.zeros(2)}},
    "versions as words": {"weight_versions": ["new"]},
    "versions above 2**53": {"weight_versions": [1 << 54]},
    "rollout id that is no text": {"rollout_id": 5},
    "counts absent": {"spec_info": None},
}


@pytest.mark.parametrize("changes", BAD_HOOK_SAMPLES.values(), ids=BAD_HOOK_SAMPLES)
def test_a_hooks_sample_is_refused_and_nothing_is_shifted_cut_or_wrapped(changes: dict[str, Any]) -> None:
    with refused(InvalidArgument, "sample s"):
        converted(hook_sample(**changes))


def test_what_a_hook_may_write_differently_means_the_same() -> None:
    plain = converted(hook_sample())
    floats = converted(hook_sample(loss_mask=[1.0, 0.0, 1.0]))
    truths = converted(hook_sample(loss_mask=[True, False, True], tokens=(1, 2, 3, 4, 5)))
    assert plain.pack() == floats.pack() == truths.pack()
    assert plain.loss_mask.tolist() == [1, 0, 1]
    removed = converted(hook_sample(remove_sample=True))
    assert removed.loss_mask.tolist() == [0, 0, 0]


def built(**changes: Any) -> Sample:
    return replace(converted(hook_sample()), **changes)


BAD_SAMPLES: dict[str, dict[str, Any]] = {
    "reward of NaN": {"reward": math.nan},
    "reward of infinity": {"reward": -math.inf},
    "reward too large": {"reward": 1e308},
    "reward a little too large": {"reward": 1_000_001},
    "reward that no float holds": {"reward": 10**400},
    "reward as a word": {"reward": "1"},
    "reward's part of NaN": {"reward": 1.0, "reward_parts": {"math": math.nan}},
    "reward's part too large": {"reward": 1.0, "reward_parts": {"math": -1e7}},
    "tokens as float32": {"tokens": np.ones(5, np.float32)},
    "tokens as int64": {"tokens": np.ones(5, np.int64)},
    "no tokens": {"tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8), "policy_ranges": ()},
    "mask as int32": {"loss_mask": np.ones(3, np.int32)},
    "log-probs as float64": {"rollout_log_probs": np.zeros(3)},
    "index below zero": {"index": -1},
    "index above uint32": {"index": 1 << 32},
    "range beyond the response": {"policy_ranges": (PolicyRange(0, 0, 4),)},
    "range that is empty": {"policy_ranges": (PolicyRange(0, 1, 1),)},
    "range that is backwards": {"policy_ranges": (PolicyRange(0, 2, 1),)},
    "ranges that overlap": {"policy_ranges": (PolicyRange(0, 0, 2), PolicyRange(1, 1, 3))},
    "ranges in the wrong order": {"policy_ranges": (PolicyRange(0, 2, 3), PolicyRange(1, 0, 2))},
    "failed without a failure": {"status": Status.FAILED},
    "completed with a failure": {"failure": Failure("X", "x")},
}


@pytest.mark.parametrize("changes", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_a_sample_cannot_be_built(changes: dict[str, Any]) -> None:
    with refused(InvalidArgument, "sample s"):
        built(**changes)


def test_a_log_prob_that_rounding_put_above_zero_is_taken() -> None:
    built(rollout_log_probs=np.asarray([2e-4, 0.0, -1.0], np.float32))


def packed(
    change_payload: Callable[[pb.SamplePayload], object] = lambda payload: None,
    change_envelope: Callable[[pb.SampleEnvelope], object] = lambda envelope: None,
) -> pb.Sample:
    """A sample on the wire, changed and sealed again."""
    sample = converted(hook_sample()).pack()
    payload = pb.SamplePayload.FromString(sample.payload)
    change_payload(payload)
    sample.payload = payload.SerializeToString()
    sample.envelope.digest, sample.envelope.payload_bytes = digest_of(sample.payload), len(sample.payload)
    change_envelope(sample.envelope)
    return sample


def column(payload: pb.SamplePayload, name: str) -> pb.Column:
    return next(one for one in payload.columns if one.name == name)


def put_column(payload: pb.SamplePayload, name: str, array: np.ndarray[Any, Any]) -> None:
    column(payload, name).CopyFrom(pack_column(name, array))


def add_mask(payload: pb.SamplePayload, dtype: type = np.int32, **lists: Sequence[int]) -> None:
    names = {"mask": "sampling_mask", "counts": "sampling_mask_counts"}
    payload.columns.extend(pack_column(names[key], np.array(values, dtype)) for key, values in lists.items())


BAD_PAYLOADS: dict[str, Callable[[pb.SamplePayload], object]] = {
    "shape whose product overflows to the right number": lambda p: column(p, "tokens").shape.extend([1 << 32, 1 << 32]),
    "shape below zero": lambda p: column(p, "tokens").shape.__setitem__(0, -5),
    "shape longer than the bytes": lambda p: column(p, "tokens").shape.__setitem__(0, 6),
    "shape of nothing times very much": lambda p: column(p, "loss_mask").shape.extend([0, 1 << 62]),
    "shape of a thousand dimensions": lambda p: column(p, "loss_mask").shape.extend([1] * 1000),
    "dtype unknown": lambda p: setattr(column(p, "tokens"), "dtype", 99),
    "dtype of another width": lambda p: setattr(column(p, "tokens"), "dtype", pb.DTYPE_INT64),
    "tokens as float32": lambda p: put_column(p, "tokens", np.ones(5, np.float32)),
    "tokens of two dimensions": lambda p: put_column(p, "tokens", np.ones((5, 1), np.int32)),
    "tokens as a scalar": lambda p: put_column(p, "tokens", np.asarray(5, np.int32)),
    "mask of two": lambda p: put_column(p, "loss_mask", np.full(3, 2, np.uint8)),
    "mask of other length": lambda p: put_column(p, "loss_mask", np.ones(4, np.uint8)),
    "log-probs of NaN": lambda p: put_column(p, "rollout_log_probs", np.full(3, np.nan, np.float32)),
    "a column twice": lambda p: p.columns.add().CopyFrom(column(p, "tokens")),
    "no log-probs": lambda p: p.columns.remove(column(p, "rollout_log_probs")),
    "a sampling mask without counts": lambda p: add_mask(p, mask=[3]),
    "counts without a sampling mask": lambda p: add_mask(p, counts=[0, 0, 0]),
    "a sampling mask longer than its counts": lambda p: add_mask(p, mask=[3, 4], counts=[1, 0, 0]),
    "counts of a longer response": lambda p: add_mask(p, mask=[3], counts=[1, 0, 0, 0]),
    "a count below zero": lambda p: add_mask(p, mask=[3], counts=[2, -1, 0]),
    "a sampling mask without the token": lambda p: add_mask(p, mask=[4], counts=[1, 0, 0]),
    "a sampling mask as int64": lambda p: add_mask(p, mask=[3], counts=[1, 0, 0], dtype=np.int64),
    "metadata that is no JSON": lambda p: setattr(p, "metadata_json", "{"),
    "metadata that is no object": lambda p: setattr(p, "metadata_json", "[]"),
    "metadata too deep for the reader": lambda p: setattr(p, "metadata_json", '{"a":' + "[" * 200_000),
    "metadata too deep": lambda p: setattr(p, "metadata_json", '{"a":' + "[" * 64 + "]" * 64 + "}"),
    "metadata with half of a surrogate pair": lambda p: setattr(p, "metadata_json", '{"a":"\\ud800"}'),
}

BAD_ENVELOPES: dict[str, Callable[[pb.SampleEnvelope], object]] = {
    "other prompt": lambda e: setattr(e, "prompt_tokens", 7),
    "other response": lambda e: setattr(e, "response_tokens", 4),
    "other trained tokens": lambda e: setattr(e, "trained_tokens", 3),
    "status unknown": lambda e: setattr(e, "status", 77),
    "status absent": lambda e: setattr(e, "status", 0),
    "reward of NaN": lambda e: setattr(e, "reward", math.nan),
    "ranges beyond the response": lambda e: e.policy_ranges.add(policy_version=0, start=3, end=9),
}


@pytest.mark.parametrize("change", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_a_payload_is_not_read(change: Callable[[pb.SamplePayload], object]) -> None:
    with pytest.raises(InvalidArgument):
        Sample.unpack(packed(change_payload=change))


@pytest.mark.parametrize("change", BAD_ENVELOPES.values(), ids=BAD_ENVELOPES)
def test_an_envelope_that_contradicts_its_payload_is_not_read(change: Callable[[pb.SampleEnvelope], object]) -> None:
    with pytest.raises(InvalidArgument):
        Sample.unpack(packed(change_envelope=change))


def test_a_payload_that_is_no_payload_is_not_read() -> None:
    sample = packed()
    sample.payload = b"\x0a\x7fabc"
    sample.envelope.digest, sample.envelope.payload_bytes = digest_of(sample.payload), len(sample.payload)
    with refused(InvalidArgument):
        Sample.unpack(sample)


@pytest.mark.parametrize("length", [2, 4])
def test_a_row_is_neither_shorter_nor_longer_than_the_response(length: int) -> None:
    check_row("sample s: loss_mask", np.ones(3, np.uint8), 3)
    with refused(InvalidArgument, length, 3):
        check_row("sample s: loss_mask", np.ones(length, np.uint8), 3)


def test_a_mask_is_zero_or_one() -> None:
    check_loss_mask("mask", np.asarray([0, 1], np.uint8))
    with refused(InvalidArgument, "mask[1]"):
        check_loss_mask("mask", np.asarray([0, 2], np.uint8))


@pytest.mark.parametrize(
    "experts", [np.zeros((4, 2, 2), np.int32), np.zeros((3, 2, 2), np.int16), np.zeros((5, 2, 2), np.int16)]
)
def test_experts_are_int16_of_all_tokens_but_the_last(experts: np.ndarray[Any, Any]) -> None:
    check_experts("experts", np.zeros((4, 2, 2), np.int16), num_tokens=5)
    with pytest.raises(InvalidArgument, match="experts (is|has)"):
        check_experts("experts", experts, num_tokens=5)


def test_the_model_bounds_tokens_and_experts() -> None:
    bounds = ModelBounds(vocab_size=6, num_layers=2, num_experts=4, experts_per_token=2)
    tokens, experts = np.arange(6, dtype=np.int32), np.full((5, 2, 2), 3, np.int16)
    bounds.check("s", tokens, {"rollout_routed_experts": experts})
    for bad_tokens, bad_experts in (
        (tokens + 1, experts),
        (tokens, experts + 1),
        (tokens, experts[:, :, :1]),
        (tokens, experts[:, :1]),
    ):
        with refused(InvalidArgument, "sample s"):
            bounds.check("s", bad_tokens, {"rollout_routed_experts": bad_experts})


def test_a_sampling_mask_has_the_models_token_ids_and_some_tokens_were_sampled_from_all() -> None:
    whole = Sample.unpack(packed(lambda payload: add_mask(payload, mask=[3, 9, 5], counts=[2, 0, 1])))
    ModelBounds(vocab_size=10, num_layers=2).check("s", whole.tokens, whole.columns)
    with refused(InvalidArgument, "sampling_mask[1]"):
        ModelBounds(vocab_size=9, num_layers=2).check("s", whole.tokens, whole.columns)


def test_ranges_cover_what_was_sampled() -> None:
    whole = (PolicyRange(3, 0, 2), PolicyRange(4, 2, 5))
    check_ranges("ranges", whole, 5)
    assert list(gaps(whole, 5)) == []
    for start, end, ranges in ((0, 5, ()), (2, 5, whole[:1]), (0, 2, whole[1:])):
        assert list(gaps(ranges, 5)) == [(start, end)]


def test_a_column_of_no_elements_travels() -> None:
    for shape in ((0,), (0, 7), (3, 0)):
        assert unpack_column(pack_column("c", np.zeros(shape, np.int16))).shape == shape


def test_json_is_what_can_be_read_back() -> None:
    assert from_json(to_json({"a": [1, {"b": "ü"}]})) == {"a": [1, {"b": "ü"}]}
    assert from_json('{"a":"\\ud83d\\ude00"}') == {"a": "😀"}
    assert from_json(to_json(NESTED)) == NESTED
    with refused(InvalidArgument):
        to_json({"a": NESTED})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_json_holds_no_number_that_is_not_finite(number: str) -> None:
    for text in (f'{{"a":{number}}}', f'{{"a":[{{"b":{number}}}]}}'):
        with refused(InvalidArgument):
            from_json(text)
        with refused(InvalidArgument):
            require_json_object(text, "metadata_json")
    with pytest.raises(InvalidArgument, match="cannot be written as JSON"):
        to_json({"a": [float(number)]})
    assert from_json('{"a":1e300,"b":-0.5}') == {"a": 1e300, "b": -0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1e7])
def test_a_score_that_no_sample_may_have_is_an_error_and_no_reward(value: float) -> None:
    for score in (reward_pb2.Score(value=value), reward_pb2.Score(value=1.0, parts={"math": value})):
        result = unpack_result(reward_pb2.ScoreResult(item_id="s", score=score))
        assert isinstance(result, ScoreError)
        assert result.reason == "SCORE_INVALID"
