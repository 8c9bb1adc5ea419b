"""Short runs of what a job can be, each whole: real services, a real SGLang engine, a real Megatron rank.

`HEADRACE_WHOLE_RUNS=all` runs every one; by default the one that holds most together.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.recorded_steps import RecordedSteps
from headrace.trajectory import ROUTED_EXPERTS
from tests.long_forms import whole_run
from tests.support.models.tiny_families import EXPERTS_OF_ENGINES, LATENTS_OF_ENGINES, make_tiny
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import SUMS, TrainingRun, unpacked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VOWELS = '''
async def vowels(args, sample, **kwargs):
    """Share of the response's characters that are vowels."""
    return sum(character in "aeiou" for character in sample.response) / max(len(sample.response), 1)
'''
SMALL = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-batch-size", "2", "--lr", "3e-3")
ENGINE_BOUND = 1e-3
"""Nats by which trainer and engine may differ on a token of the same weights."""

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
"""SGLang pads experts on a CPU to multiples of this, and its checksums are over what is padded."""
Row = Mapping[str, Any]


@asynccontextmanager
async def started(tmp_path: Path, *flags: str, **parts: Any) -> AsyncIterator[TrainingRun]:
    """A small run that is judged by its vowels."""
    (tmp_path / "vowels.py").write_text(VOWELS)
    checkpoint = parts.pop("checkpoint", None) or make_tiny_qwen3(tmp_path / "model")
    judge = () if "--loss-mask-type" in flags else ("--custom-rm-path", f"{tmp_path}/vowels.py:vowels")
    run = TrainingRun(tmp_path, checkpoint, *SMALL, *judge, *flags, **parts)
    async with run.started():
        yield run


async def rows_of(run: TrainingRun, steps: int) -> Sequence[Row]:
    """Of a run that ended well, with every step in it and a ledger that agrees with the trainer's record."""
    await run.finished()
    rows = [row for row in run.metrics() if "samples/count" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0
    return rows


@whole_run
async def test_generations_that_a_publication_aborts_go_on_where_they_were(tmp_path: Path) -> None:
    flags = (
        "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--update-weight-pause-mode", "abort",
        "--max-staleness", "2", "--rollout-max-response-len", "400", "--n-samples-per-prompt", "4",
    )  # fmt: skip
    async with started(tmp_path, "--num-rollout", "6", *flags) as run:
        await rows_of(run, 6)
    groups = [[list(sample.policy_ranges) for sample in group.samples] for group in await run.groups() if group.samples]
    continued = [ranges for group in groups for ranges in group if len({r.policy_version for r in ranges}) > 1]
    assert continued, "no generation went on under other weights"
    for group in groups:  # masked is what is older than the group's last lease, in every sample of it
        masked = [r.policy_version for ranges in group for r in ranges if r.masked]
        trained = [r.policy_version for ranges in group for r in ranges if not r.masked]
        assert trained
        assert max(masked, default=-1) < min(trained)
        assert not all(ranges[-1].masked for ranges in group), "a lease is given again for what was not finished"
    released = [event["why"] for event in run.events("rollout") if event["event"] == "group_released"]
    assert any(why.startswith("interrupted with") for why in released), released


class ChosenExperts:
    """Those that transformers chooses for the tokens of a text, by the checkpoint's own weights, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._seen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self._model.model.layers):
            if isinstance(experts := getattr(layer.mlp, "experts", None), nn.Module):
                experts.register_forward_pre_hook(self._note(number))

    def of(self, tokens: Sequence[int]) -> dict[int, NDArray[np.int64]]:
        """By layer with experts [tokens - 1, experts of a token], in ascending order."""
        with torch.no_grad():
            self._model(torch.tensor([list(tokens[:-1])]))
        return {layer: np.sort(chosen.numpy(), -1) for layer, chosen in self._seen.items()}

    def _note(self, layer: int) -> Any:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            self._seen[layer] = given[1]

        return note


@whole_run
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
async def test_ppo_with_a_critic_that_warms_up_alone_and_experts_that_the_engine_chose(
    tmp_path: Path, family: str
) -> None:
    checkpoint, kept = make_tiny(tmp_path / "model", family, **EXPERTS), str(tmp_path / "steps/{rollout_id}.samples")
    flags = (
        "--advantage-estimator", "ppo", "--critic-lr", "2e-3", "--num-critic-only-steps", "1", "--num-rollout", "5",
        "--use-rollout-routing-replay", "--save-debug-rollout-data", kept,
    )  # fmt: skip
    async with started(tmp_path, *flags, checkpoint=checkpoint) as run:
        first, *others = rows = await rows_of(run, 5)
    reference, compared = ChosenExperts(checkpoint), 0
    for sample in unpacked(list(RecordedSteps(kept).read(0).samples)):
        found = sample.columns[ROUTED_EXPERTS]
        for layer, expected in reference.of(sample.tokens.tolist()).items():
            assert np.array_equal(np.sort(found[:, layer], -1), expected), "transformers chooses the same experts"
        compared += len(found)
    assert compared > 100
    assert max(row["log_prob_diff/max"] for row in rows if "log_prob_diff/max" in row) < ENGINE_BOUND
    assert "grad_norm" not in first, "the first step trained the critic alone"
    assert [row["updated"] for row in others] == [1.0] * 4
    misses = [abs(row["critic/value"] - row["critic/return"]) for row in rows]
    assert min(misses[1:]) < misses[0], "the critic learns what returns are like"


@whole_run
@pytest.mark.parametrize("narrowed", [(), ("--rollout-top-p", "0.9", "--keep-sampling-mask")], ids=["all", "top-p"])
async def test_true_on_policy_training_holds_with_a_real_engine(tmp_path: Path, narrowed: Sequence[str]) -> None:
    async with started(tmp_path, "--num-rollout", "5", "--true-on-policy-mode", *narrowed) as run:
        rows = await rows_of(run, 5)
    assert all(1 < row["sampling_mask/kept"] < 512 and not row["sampling_mask/outside"] for row in rows if narrowed)
    assert max(row["log_prob_diff/max"] for row in rows) < 1e-4
    assert [row["ratio/mean"] for row in rows] == [1.0] * 5
    assert [row["clip_fraction"] for row in rows] == [0.0] * 5


@whole_run
async def test_with_colocate_trainer_and_a_real_engine_take_turns_and_a_rollout_service_that_dies_loses_nothing(
    tmp_path: Path,
) -> None:
    flags = ("--colocate", "--use-fault-tolerance", "--save-interval", "1")
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:4]))
    evaluation = ("--eval-prompt-data", "sums", f"{tmp_path}/sums.jsonl", "--eval-interval", "2")
    async with started(tmp_path, "--num-rollout", "5", *flags, *evaluation) as run:
        await run.until_step(2)
        run.kill("rollout")
        rows = await rows_of(run, 5)
    assert max(row["log_prob_diff/max"] for row in rows) < ENGINE_BOUND
    evaluated = {row["step"] for row in run.metrics() if "eval/sums" in row}
    assert evaluated >= {0, 4, 5}, "that of step 2 may have ended with the service"
    turns = [e["event"].removeprefix("devices_") for e in run.events("trainer") if e["event"].startswith("devices_")]
    assert [turn for turn, _ in itertools.groupby(turns)] == turns, "each side's turn ends before the other's begins"
    assert turns.count("taken") >= 5
    released = [event["engines"] for event in run.events("rollout") if event["event"] == "engine_memory_released"]
    assert released.count(["engine-0"]) >= 5


@whole_run
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("glm4", {}),
        ("qwen3_moe", EXPERTS_OF_ENGINES),
        ("glm4_moe", EXPERTS_OF_ENGINES),
        ("qwen2_moe", EXPERTS_OF_ENGINES | {"shared_expert_intermediate_size": 64}),
        ("glm4_moe_lite", LATENTS_OF_ENGINES),
        ("deepseek_v3", LATENTS_OF_ENGINES),
        ("gemma3", {}),
    ],
)
async def test_a_family_is_served_trained_and_published(tmp_path: Path, family: str, shape: Mapping[str, Any]) -> None:
    checkpoint = make_tiny(tmp_path / "model", family, **shape)
    async with started(tmp_path, "--num-rollout", "3", checkpoint=checkpoint) as run:
        rows = await rows_of(run, 3)
    largest = [row["log_prob_diff/max"] for row in rows]
    print(f"{family}: trainer against engine, largest difference of a token's log-prob in each step: {largest}")
    assert max(largest) < ENGINE_BOUND, "the last two steps' samples are of published weights"
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
