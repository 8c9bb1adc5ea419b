"""The samples of a micro-batch as tensors: padded, packed, and behind a prompt that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trajectory import Sample, Status
from services.trainer.plan.planning import collate
from services.trainer.plan.rows import Packing, RowSegment, row_tokens


def sample(prompt: int, response: int, mask: list[int] | None = None) -> Sample:
    return Sample(
        sample_id=f"{prompt}/{response}",
        group_id="g",
        index=0,
        prompt="",
        response="",
        tokens=np.arange(10, 10 + prompt + response, dtype=np.int32),
        loss_mask=np.array(mask or [1] * response, dtype=np.uint8),
        rollout_log_probs=-np.arange(1, response + 1, dtype=np.float32),
        status=Status.COMPLETED,
    )


def test_a_padded_row_holds_one_sample_and_column_t_speaks_of_response_token_t() -> None:
    batch = collate([sample(3, 2, [1, 0]), sample(2, 4)], "padded")
    assert batch.rows.tokens.tolist() == [[10, 11, 12, 13, 0], [10, 11, 12, 13, 14]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.rows.segments is None
    assert batch.targets.tolist() == [[13, 14, 0, 0], [12, 13, 14, 15]]
    assert batch.loss_mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.rollout_log_probs.tolist() == [[-1, -2, 0, 0], [-1, -2, -3, -4]]
    assert batch.logit_positions.tolist() == [2, 3, 6, 7, 8, 9]
    assert batch.target_slots.tolist() == [0, 1, 4, 5, 6, 7]


def test_a_packed_row_holds_samples_one_behind_the_other() -> None:
    batch = collate([sample(3, 2), sample(2, 4)], "packed")
    assert batch.rows.tokens.tolist() == [[10, 11, 12, 13, 10, 11, 12, 13, 14]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch.rows.segments == (RowSegment(0, 4), RowSegment(4, 9))
    assert batch.logit_positions.tolist() == [2, 3, 5, 6, 7, 8]


def test_samples_of_a_group_follow_one_copy_of_their_prompt() -> None:
    batch = collate([sample(3, 2), sample(2, 2), sample(3, 3), sample(3, 1)], "shared_prompts")
    assert batch.rows.tokens.tolist() == [[10, 11, 12, 13, 13, 14, 10, 11, 12]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 2]]
    assert batch.rows.segments == (RowSegment(0, 3), RowSegment(3, 4, 0), RowSegment(4, 6, 0), RowSegment(6, 9))
    assert batch.logit_positions.tolist() == [2, 3, 7, 8, 2, 4, 5, 2]
    assert batch.targets.tolist() == [[13, 14, 0], [12, 13, 0], [13, 14, 15], [13, 0, 0]]


@pytest.mark.parametrize("packing", get_args(Packing))
def test_a_response_without_a_prompt_loses_only_the_token_that_nothing_predicts(packing: Packing) -> None:
    batch = collate([sample(0, 3)], packing)
    assert batch.rows.tokens.tolist() == [[10, 11]]
    assert batch.target_slots.tolist() == [1, 2]
    assert batch.loss_mask.tolist() == [[0, 1, 1]]
    assert batch.rollout_log_probs.tolist() == [[0, -2, -3]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_cost_of_a_micro_batch_is_known_from_lengths_alone(shapes: list[tuple[int, int]]) -> None:
    samples = [replace(sample(p, r), sample_id=str(i), group_id=f"g{p}") for i, (p, r) in enumerate(shapes)]
    lengths = [(s.group_id, s.prompt_length, s.response_length) for s in samples]
    for packing in get_args(Packing):
        assert row_tokens(lengths, packing) >= collate(samples, packing).rows.tokens.numel()


@pytest.mark.parametrize("packing", get_args(Packing))
def test_rows_are_filled_up_to_a_multiple_behind_what_they_hold(packing: Packing) -> None:
    rows = collate([sample(3, 2), sample(2, 4)], packing).rows
    aligned, size = rows.aligned(4), rows.tokens.shape[1]
    assert aligned.tokens.shape[1] == aligned.positions.shape[1] == size + -size % 4
    assert aligned.tokens[:, :size].equal(rows.tokens)
    if rows.segments is not None:
        assert aligned.segments == (*rows.segments, RowSegment(size, aligned.tokens.shape[1]))
    assert aligned.aligned(4) is aligned
