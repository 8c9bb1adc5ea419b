"""Images in rows: places of tokens and embeddings under every packing, and samples that contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from headrace.errors import InvalidArgument
from headrace.images import IMAGE_GRIDS, PIXEL_VALUES, image_starts
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.plan.planning import collate
from services.trainer.plan.rows import Packing, row_images
from tests.support.ranks.vision_cases import IMAGE, samples

VISION = Vision(IMAGE, 1176, 2, (2, 3, 3))


@pytest.mark.parametrize("packing", get_args(Packing))
def test_tokens_have_the_places_of_their_own_sample_under_every_packing(packing: Packing) -> None:
    every = samples()
    micro = collate(every, packing)
    found = row_images(micro.samples, micro.sample_numbers, micro.rows, VISION)
    for number, sample in enumerate(every):
        alone = collate([sample], "packed")
        expected = row_images([sample], alone.sample_numbers, alone.rows, VISION)
        mine = micro.sample_numbers == number
        positions = micro.rows.positions[mine]
        assert (found.axes[:, mine] == expected.axes[:, 0][:, positions]).all()
    assert sorted(found.slots[found.slots >= 0].unique().tolist()) == list(range(int(found.slots.max()) + 1))
    num_images = 2 if packing == "shared_prompts" else 5
    assert len(found.images) == num_images


def test_text_goes_on_behind_the_longest_side_of_an_image() -> None:
    sample = samples()[0]  # three tokens, an image of 4 x 6 patches behind its start, its end, two more
    micro = collate([sample], "packed")
    found = row_images([sample], micro.sample_numbers, micro.rows, VISION)
    time, height, width = found.axes[:, 0, :13].tolist()
    assert time == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9]
    assert height == [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9]
    assert width == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]
    assert found.slots[0, :13].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1, -1]


def test_an_image_token_that_the_policy_sampled_is_text() -> None:
    sample = samples()[0]
    tokens = sample.tokens.copy()
    tokens[-2] = IMAGE
    starts = image_starts("", VISION, tokens, sample.columns)
    assert starts == image_starts("", VISION, sample.tokens, sample.columns)
    changed = replace(sample, tokens=tokens)
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
    sample: Sample = samples()[0]
    columns = {name: array for name, array in {**sample.columns, **change}.items() if array is not None}
    with pytest.raises(InvalidArgument, match=f"sample s: .*{said}"):
        image_starts("sample s:", VISION, sample.tokens, columns)
