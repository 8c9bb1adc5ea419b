"""Users' rewards see the tokens of a sample, and what they write into its metadata comes back with the score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.client.reward import RewardClient
from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.rpc.server import Listen
from headrace.score import Score, ScoreError, ScoreItem
from headrace.trajectory import PolicyRange, Sample, Status
from services.reward.server import RewardServer
from services.rollout import scoring
from services.rollout.scoring import SampleScorer

HOOKS = """
def confidence(args, sample, **kwargs):
    assert len(sample.tokens) - sample.response_length == 2
    trained = [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask) if m]
    sample.metadata["trained"] = sample.tokens[-len(trained):]
    return sum(trained)

def by_number_of_tokens(args, samples):
    for sample in samples:
        sample.metadata.pop("seen", None)
    return [float(len(sample.tokens)) for sample in samples]

def leaves_no_json(args, samples):
    samples[0].metadata["bad"] = {1, 2}
    samples[1].metadata = ["a"]
    samples[2].metadata["long"] = "a" * (1 << 20)
    return [1.0] * len(samples)
"""


@asynccontextmanager
async def serving(folder: Path, name: str, *, group_rm: bool = False) -> AsyncIterator[str]:
    (folder / "hooks.py").write_text(HOOKS)
    section = RewardSection(reward_workers=1, custom_rm_path=f"{folder / 'hooks.py'}:{name}", group_rm=group_rm)
    server = await RewardServer.start(section, section_args(section), Listen("127.0.0.1:0"))
    try:
        yield server.rpc.address
    finally:
        await server.stop(1)


def sample(index: int) -> Sample:
    return Sample(
        sample_id=f"s{index}",
        group_id="g",
        index=index,
        prompt="3 + 4 =",
        response="7",
        tokens=np.arange(10, 15 + index, dtype=np.int32),
        loss_mask=np.array([0] * (1 + index) + [1, 1], np.uint8),
        rollout_log_probs=np.array([0.0] * (1 + index) + [-0.5, -0.25], np.float32),
        status=Status.COMPLETED,
        metadata={"seen": True},
        policy_ranges=[PolicyRange(0, 0, 3 + index)],
    )


async def scored(address: str, *samples: Sample) -> list[Sample]:
    scorer = SampleScorer(address, item_seconds=60.0)
    try:
        return await scorer.score(samples)
    finally:
        await scorer.close()


async def test_a_reward_sees_tokens_mask_and_log_probs_and_writes_metadata(tmp_path: Path) -> None:
    async with serving(tmp_path, "confidence") as address:
        (first, second) = await scored(address, sample(0), sample(1))
    assert (first.reward, second.reward) == (-0.75, -0.75)
    assert first.metadata == {"seen": True, "trained": [13, 14]}
    assert second.metadata == {"seen": True, "trained": [14, 15]}


async def test_a_groups_reward_sees_them_as_well_and_metadata_that_it_empties_is_empty(tmp_path: Path) -> None:
    async with serving(tmp_path, "by_number_of_tokens", group_rm=True) as address:
        made = await scored(address, sample(0), sample(1))
    assert [(one.reward, one.metadata) for one in made] == [(5.0, {}), (6.0, {})]


async def test_more_tokens_than_a_request_holds_are_left_out_and_the_group_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_MOST_COLUMN_BYTES", 10)
    async with serving(tmp_path, "by_number_of_tokens", group_rm=True) as address:
        made = await scored(address, sample(0), sample(1))
    assert [one.reward for one in made] == [0.0, 0.0]


async def test_metadata_that_cannot_be_stored_is_its_samples_failure(tmp_path: Path) -> None:
    async with serving(tmp_path, "leaves_no_json", group_rm=True) as address:
        *bad, good = await scored(address, *(sample(index) for index in range(4)))
    assert [one.failure.message.count("metadata that cannot be stored") for one in bad if one.failure] == [1, 1, 1]
    assert (good.reward, good.metadata) == (1.0, {"seen": True})


TOKENS, MASK, LOG_PROBS = np.arange(3, dtype=np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32)
WHOLE: dict[str, np.ndarray] = {"tokens": TOKENS, "loss_mask": MASK, "rollout_log_probs": LOG_PROBS}


BAD_COLUMNS: list[tuple[dict[str, np.ndarray], str]] = [
    ({"tokens": TOKENS.astype(np.int64)}, "int64"),
    ({"tokens": -TOKENS}, "tokens"),
    ({"loss_mask": MASK * 2}, "loss_mask"),
    ({"loss_mask": np.ones(2, np.uint8)}, "must have 2"),
    ({"loss_mask": MASK[:0], "rollout_log_probs": LOG_PROBS[:0]}, "response_tokens is 1"),
    ({"rollout_log_probs": LOG_PROBS + 1}, "rollout_log_probs"),
    ({"tokens": np.zeros(0, np.int32)}, "more than the 0 tokens"),
    ({"another": MASK}, "tokens, loss_mask, rollout_log_probs"),
]


async def test_columns_that_no_sample_could_have_are_that_items_error(tmp_path: Path) -> None:
    good = ScoreItem("good", "", "7", metadata={}, response_tokens=1, columns=WHOLE)
    bad = [replace(good, item_id=f"bad {i}", columns={**WHOLE, **change}) for i, (change, _) in enumerate(BAD_COLUMNS)]
    async with serving(tmp_path, "by_number_of_tokens", group_rm=True) as address, RewardClient(address) as client:
        right, *wrong = await client.score([good, *bad], deadline_seconds=120)
    assert isinstance(right, Score)
    for error, (_, named) in zip(wrong, BAD_COLUMNS, strict=True):
        assert isinstance(error, ScoreError)
        assert error.reason == "ITEM_INVALID"
        assert named in error.message
