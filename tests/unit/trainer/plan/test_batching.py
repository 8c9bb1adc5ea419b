"""The samples of a micro-batch as tensors: padded, packed, behind a shared prompt, with experts' choices and images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidArgument
from headrace.images import IMAGE_GRIDS, PIXEL_VALUES, image_starts
from headrace.models.architecture import Experts, Vision
from headrace.trajectory import ROUTED_EXPERTS, Sample, Status
from services.trainer.plan.planning import collate
from services.trainer.plan.rows import Packing, RolloutChoices, RowSegment, row_images, row_tokens
from tests.support.ranks.algorithm_cases import told
from tests.support.ranks.vision_cases import IMAGE, samples

EXPERTS = Experts(4, 48, 2, (), None, "softmax", True, None, False, False, None, None)
CHOICES = RolloutChoices(2, EXPERTS)
VISION = Vision(IMAGE, 1176, 2, (0, 0, 1, 1, 1, 2, 2, 2), "visual.")


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


def test_dense_layers_are_not_asked() -> None:
    choices = RolloutChoices(2, replace(EXPERTS, dense_layers=(0,)))
    chosen = _with(told(0)[0], layer=0, value=0)
    micro = collate([chosen], "padded")
    assert list(choices.of(micro.samples, micro.sample_numbers, micro.rows).by_layer) == [1]


@pytest.mark.parametrize(
    ("value", "message"), [(4, r"token 2, layer 1 is \[4, 4\], not 2 of the model's 4 experts"), (0, r"is \[0, 0\]")]
)
def test_choices_that_are_not_this_models_are_refused(value: int, message: str) -> None:
    micro = collate([_with(told(0)[0], layer=1, value=value)], "padded")
    with pytest.raises(InvalidArgument, match=message):
        CHOICES.of(micro.samples, micro.sample_numbers, micro.rows)


def _with(sample: Sample, *, layer: int, value: int) -> Sample:
    column = sample.columns[ROUTED_EXPERTS].copy()
    column[2, layer] = value
    return replace(sample, columns={ROUTED_EXPERTS: column.astype(np.int16)})


def test_text_goes_on_behind_the_longest_side_of_an_image() -> None:
    shown = samples()[0]  # three tokens, an image of 4 x 6 patches behind its start, its end, two more
    micro = collate([shown], "packed")
    found = row_images([shown], micro.sample_numbers, micro.rows, VISION)
    time, height, width = found.axes[:, 0, :13].tolist()
    assert time == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9]
    assert height == [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9]
    assert width == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]
    assert found.slots[0, :13].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1, -1]


def test_an_image_token_that_the_policy_sampled_is_text() -> None:
    shown = samples()[0]
    tokens = shown.tokens.copy()
    tokens[-2] = IMAGE
    starts = image_starts("", VISION, tokens, shown.columns)
    assert starts == image_starts("", VISION, shown.tokens, shown.columns)
    changed = replace(shown, tokens=tokens)
    micro = collate([changed], "packed")
    assert row_images([changed], micro.sample_numbers, micro.rows, VISION).slots[0, 10:].tolist() == [-1] * (
        len(tokens) - 11
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({PIXEL_VALUES: None}, f"{PIXEL_VALUES} is absent, must be float32 \\[24, 1176\\]"),
        ({PIXEL_VALUES: np.zeros((20, 1176), np.float32)}, r"is float32 \[20, 1176\]"),
        ({PIXEL_VALUES: np.full((24, 1176), np.nan, np.float32)}, "not finite"),
        ({IMAGE_GRIDS: np.array([[1, 3, 8]])}, "a multiple of 2"),
        ({IMAGE_GRIDS: np.array([[1, 1 << 40, 1 << 40]])}, "must be images' patches"),
        (
            {IMAGE_GRIDS: np.array([[1, 4, 8]]), PIXEL_VALUES: np.zeros((32, 1176), np.float32)},
            "have no 8 image tokens \\(302\\) in a row for image 0 of 1",
        ),
        (
            {IMAGE_GRIDS: np.array([[1, 4, 6]] * 2), PIXEL_VALUES: np.zeros((48, 1176), np.float32)},
            "for image 1 of 2",
        ),
    ],
)
def test_images_that_contradict_their_tokens_are_named(change: dict[str, Any], said: str) -> None:
    shown = samples()[0]
    columns = {name: array for name, array in {**shown.columns, **change}.items() if array is not None}
    with pytest.raises(InvalidArgument, match=f"sample s: .*{said}"):
        image_starts("sample s:", VISION, shown.tokens, columns)
