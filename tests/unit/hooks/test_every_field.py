"""Every field of a hook's sample survives the way out of its worker, to the ledger, and back."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.hooks import Sample, from_hook, run_generate, to_hook
from headrace.hooks.convert import plain
from headrace.process import worker_main as codec
from headrace.trajectory import Sample as WireSample
from services.buffer.payload import check_samples

TEXTS = st.text(max_size=8)
NUMBERS = st.integers(0, 1 << 40)
JSON = st.dictionaries(TEXTS, st.none() | st.booleans() | NUMBERS | TEXTS | st.lists(TEXTS, max_size=2), max_size=3)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), min_size=1, max_size=3)
LOG_PROBS = st.floats(-100, 0, width=32)
NOT_CARRIED = {"reward"}
"""It is the envelope's, and has a test of its own."""
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ARRAYS = st.sampled_from(["<i4", "<i8", "<f4", "<f8", "|u1"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 100), max_size=6).map(lambda values: np.array(values, dtype))
)
"""Of any shape that divides them: here one or three columns."""
FILES = st.lists(st.binary(max_size=9), min_size=1, max_size=3)
SHAPED = st.tuples(ARRAYS, st.booleans()).map(
    lambda pair: pair[0].reshape(-1, 3) if pair[1] and len(pair[0]) % 3 == 0 else pair[0]
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 5))

    def row(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=response, max_size=response))

    status = draw(st.sampled_from([s for s in Sample.Status if s is not Sample.Status.PENDING]))
    counts = st.integers(0, 1000)
    tokens = draw(st.lists(st.integers(0, 1 << 30), min_size=prompt + response, max_size=prompt + response))
    kept = [draw(st.lists(counts, max_size=2)) for _ in range(response)]
    kept = [[*ids, token] if ids else [] for ids, token in zip(kept, tokens[prompt:], strict=True)]
    return Sample(
        group_index=draw(st.none() | NUMBERS),
        index=draw(st.integers(0, 1000)),
        prompt=draw(TEXTS | MESSAGES),
        tokens=tokens,
        response=draw(TEXTS),
        response_length=response,
        label=draw(st.none() | TEXTS),
        loss_mask=row(st.integers(0, 1)),
        weight_versions=draw(st.lists(st.integers(0, 1 << 40).map(str), min_size=1, max_size=3)),
        rollout_log_probs=row(LOG_PROBS),
        multimodal_inputs=draw(
            st.none()
            | st.dictionaries(NAMES, st.lists(st.binary(max_size=9), min_size=1, max_size=3), min_size=1, max_size=3)
        ),
        multimodal_train_inputs=draw(st.none() | st.dictionaries(NAMES, SHAPED, min_size=1, max_size=3)),
        rollout_routed_experts=draw(st.none() | st.just(np.ones((prompt + response - 1, 2, 1), np.int16))),
        rollout_sampling_mask=draw(st.none() | st.just(kept)),
        remove_sample=draw(st.booleans()),
        teacher_log_probs=draw(st.none() | st.just(row(LOG_PROBS))),
        status=status,
        metadata=draw(JSON),
        generate_function_path=draw(st.none() | TEXTS),
        custom_rm_path=draw(st.none() | TEXTS),
        train_metadata=draw(st.none() | JSON.filter(bool)),
        rollout_id=draw(st.text(min_size=1, max_size=8)),
        session_id=draw(st.none() | TEXTS),
        non_generation_time=draw(st.floats(0, 1e6)),
        spec_info=Sample.SpecInfo(*(draw(counts) for _ in range(4))),
        prefix_cache_info=Sample.PrefixCacheInfo(*(draw(counts) for _ in range(2))),
        failure_reason=draw(st.text(min_size=1, max_size=8)) if status is Sample.Status.FAILED else None,
    )


def there_and_back(sample: Sample) -> Sample:
    """As run_generate's result leaves its worker, and as a put reaches the ledger and leaves it."""
    ((out,),) = codec.decode(run_generate, codec.encode([[plain(sample)]]))
    wire = from_hook(out, sample_id="s", group_id="g", index=sample.index or 0)
    packed = pb.Sample.FromString(wire.pack().SerializeToString())
    check_samples([(packed.envelope, packed.payload)])
    return to_hook(WireSample.unpack(packed))


@settings(deadline=None, max_examples=200)
@given(samples())
def test_every_field_that_a_function_sets_comes_back(sample: Sample) -> None:
    expected = replace(sample, loss_mask=[0] * sample.response_length) if sample.remove_sample else sample
    back = there_and_back(sample)
    for field in fields(Sample):
        if field.name not in NOT_CARRIED:
            np.testing.assert_equal(getattr(back, field.name), getattr(expected, field.name), field.name)


def test_what_is_at_its_default_takes_no_place() -> None:
    bare = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    assert from_hook(bare, sample_id="s", group_id="g", index=0).hook_fields == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"session_id": 5}, r"sample s: .*`int` - at `\$\.session_id`"),
        ({"prompt": ["a"]}, r"at `\$\.messages"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "sample s: "),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    with pytest.raises(InvalidArgument, match=said):
        from_hook(replace(sample, **change), sample_id="s", group_id="g", index=0, rendered_prompt="text")


def test_what_another_producer_wrote_there_does_not_reach_a_function() -> None:
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    wire = from_hook(sample, sample_id="s", group_id="g", index=0)
    assert to_hook(replace(wire, hook_fields={"session_id": {"a": 1}, "mine": 2})).session_id is None


@pytest.mark.parametrize("behind", [b"", b"\x98\x06\x01"], ids=["walked", "parsed, for a field of tomorrow"])
def test_what_is_there_and_no_json_object_is_refused_by_the_ledger(behind: bytes) -> None:
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    sample.weight_versions = ["0"]
    packed = from_hook(sample, sample_id="s", group_id="g", index=0).pack()
    check_samples([(packed.envelope, packed.payload + behind)])
    broken = pb.SamplePayload(hook_json="[1]").SerializeToString()
    with pytest.raises(InvalidArgument, match="must be a JSON object"):
        check_samples([(packed.envelope, packed.payload + behind + broken)])
