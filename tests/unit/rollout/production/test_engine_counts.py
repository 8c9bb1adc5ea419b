"""Samples keep what engines count: prefix cache and speculative decoding, over all requests of a sample."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.hooks.convert import to_hook
from headrace.trajectory import Sample, Status
from services.rollout.engine.replies import NO_COUNTS, BadAnswer, EngineCounts, decode
from services.rollout.production.partial import generation_of

META = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 12}
SPECULATIVE = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 20, "spec_verify_ct": 5}


def counts_in(meta: dict[str, Any]) -> EngineCounts:
    return decode(json.dumps(meta).encode(), EngineCounts)


def sample_with(counts: EngineCounts) -> Sample:
    sample = Sample(
        *("s", "g", 0, "prompt", "response"),
        tokens=np.asarray([1, 2], dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.uint8),
        rollout_log_probs=np.asarray([-0.5], dtype=np.float32),
        status=Status.ABORTED,
        hook_fields=counts.hook_fields(),
    )
    return Sample.unpack(sample.pack())


@pytest.mark.parametrize("meta", [META, META | SPECULATIVE])
def test_counts_travel_with_a_sample_and_go_on_when_it_is_continued(meta: dict[str, Any]) -> None:
    sample = sample_with(counts_in(meta))
    seen = to_hook(sample)
    assert seen.prefix_cache_info.prefix_cache_hit_rate == 4 / 9
    assert seen.spec_info.spec_verify_ct == meta.get("spec_verify_ct", 0)
    assert seen.spec_info.spec_accept_rate == (0.3 if "spec_verify_ct" in meta else 0.0)
    later = generation_of(sample).counts + counts_in(META)
    assert (later.prompt_tokens, later.cached_tokens) == (18, 8)
    if "spec_verify_ct" in meta:
        assert (later.correct_drafts, later.verifications, later.completion_tokens) == (6, 5, 24)


def test_a_sample_without_requests_has_no_counts() -> None:
    assert NO_COUNTS.hook_fields() == {}
    assert generation_of(sample_with(NO_COUNTS)).counts == NO_COUNTS


@pytest.mark.parametrize("value", [-1, 1.5, "4", True, None, 1 << 64])
@pytest.mark.parametrize("name", [*META, *SPECULATIVE])
def test_a_count_that_is_none_is_a_bad_answer(name: str, value: Any) -> None:
    with pytest.raises(BadAnswer, match=name):
        counts_in(META | SPECULATIVE | {name: value})
