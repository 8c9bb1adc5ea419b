"""Top-p and top-k in training: masks of engines and of the policy, against a float64 model that samples so.

Responses are drawn from the model at temperature 0.8 with top_p 0.11 and top_k 26. One job gets the sets that they were
drawn from and the log-probs within them, as an engine returns them. Another gets log-probs of the whole vocabulary, and
finds the sets itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.trajectory import SAMPLING_MASK, SAMPLING_MASK_COUNTS, Sample, Status
from services.trainer.rl.algorithms import vocab_parallel
from services.trainer.rl.sampling_mask import policy_mask
from tests.support.models.float64_reference import against_group
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.ranks.algorithm_cases import SentCase
from tests.support.ranks.rank_results import metrics, network
from tests.support.ranks.ranks import run_cases

TEMPERATURE, TOP_P, TOP_K = 0.8, 0.11, 26
KEPT = {"keep_sampling_mask": True}


@pytest.mark.parametrize("chunk_elements", [1, 1 << 26])
@pytest.mark.parametrize(
    ("top_p", "top_k", "kept", "outside"),
    [
        (1.0, None, [[0, 1, 2, 3], [0, 1, 2, 3]], [False, False]),
        (0.7, None, [[1, 2, 0], [3, 0]], [True, False]),  # the last one needed is the one that crosses top_p
        (0.5, None, [[1, 0], [3, 0]], [True, True]),
        (1.0, 2, [[1, 2, 0], [3, 0]], [True, False]),
        (0.7, 1, [[1, 0], [3, 0]], [True, True]),
    ],
)
def test_the_policys_mask_is_that_of_the_rule_with_the_sampled_token(
    monkeypatch: pytest.MonkeyPatch,
    chunk_elements: int,
    top_p: float,
    top_k: int | None,
    kept: list[list[int]],
    outside: list[bool],
) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    p = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.3, 0.05, 0.05, 0.6]], dtype=torch.float64)
    target = torch.tensor([0, 0])
    weight = torch.eye(4, dtype=torch.float64)
    found = policy_mask(p.log() * TEMPERATURE, weight, target, TEMPERATURE, None, top_p=top_p, top_k=top_k)
    by_position = [sorted(found.kept.ids[found.kept.positions == row].tolist()) for row in (0, 1)]
    assert by_position == [sorted(ids) for ids in kept]
    assert found.is_outside.tolist() == outside
    masses = torch.tensor([sum(p[row, i] for i in ids) for row, ids in enumerate(kept)], dtype=torch.float64)
    torch.testing.assert_close(found.log_mass.exp(), masses)


def drawn(model: Any, number: int) -> Sample:
    """A sample as an engine with sampling masks returns it. Its second token is a tool's."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 320, (1, 4), generator=generator)
    mask, counts, log_probs = list[int](), list[int](), list[float]()
    for place in range(6):
        kept, p = rule(model, tokens)
        if place == 1:
            tokens = torch.cat((tokens, torch.tensor([[7]])), 1)
            counts, log_probs = [*counts, 0], [*log_probs, 0.0]
            continue
        chosen = int(torch.multinomial(p[kept], 1, generator=generator))
        tokens = torch.cat((tokens, kept[None, None, chosen]), 1)
        mask, counts = mask + kept.tolist(), [*counts, len(kept)]
        log_probs.append(math.log(p[kept[chosen]] / p[kept].sum()))
    return Sample(
        *(f"s{number}", f"g{number // 3}", number, "", ""),
        tokens=tokens[0].numpy().astype(np.int32),
        loss_mask=np.array([1, 0, 1, 1, 1, 1], np.uint8),
        rollout_log_probs=np.array(log_probs, np.float32),
        status=Status.COMPLETED,
        reward=float(number % 3),
        columns={SAMPLING_MASK: np.array(mask, np.int32), SAMPLING_MASK_COUNTS: np.array(counts, np.int32)},
    )


def rule(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The kept ids of the next token, and the probabilities of all."""
    with torch.no_grad():
        p = (model(tokens).logits[0, -1] / TEMPERATURE).softmax(-1)
    kept: list[int] = []
    for token in p.argsort(descending=True).tolist()[:TOP_K]:
        if p[kept].sum() > TOP_P:
            break
        kept.append(token)
    return torch.tensor(kept), p


def without_mask(sample: Sample, model: Any) -> Sample:
    """The same as an engine returns it that knows no sampling masks."""
    whole, _ = log_probs(model, sample)
    known = np.where(sample.loss_mask, whole.detach().numpy(), 0.0).astype(np.float32)
    return replace(sample, columns={}, rollout_log_probs=known)


def log_probs(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Of the response's tokens, in the whole vocabulary and in their sets."""
    tokens, start = torch.from_numpy(sample.tokens.astype(np.int64)), sample.prompt_length
    log_p = (model(tokens[None]).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
    counts, ids = (torch.from_numpy(sample.columns[n]).long() for n in (SAMPLING_MASK_COUNTS, SAMPLING_MASK))
    sets = [row[own] if len(own) else row for row, own in zip(log_p, ids.split(counts.tolist()), strict=True)]
    at_token = log_p.gather(-1, tokens[start:, None])[:, 0]
    return at_token, at_token - torch.stack([own.logsumexp(-1) for own in sets])


@dataclass(frozen=True)
class Expected:
    folder: Path
    grad_norm: float
    kept: float


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    folder = tmp_path_factory.mktemp("masks")
    checkpoint = make_tiny_qwen3(folder / "model")
    model = network(checkpoint)
    samples = [drawn(model, number) for number in range(6)]
    write(folder / "given.samples", samples)
    write(folder / "bare.samples", [without_mask(sample, model) for sample in samples])
    write(folder / "mixed.samples", [s if i % 2 else without_mask(s, model) for i, s in enumerate(samples)])

    def case(name: str, samples: str, train: Any, megatron: Any, ranks: int) -> SentCase:
        rollout = {"rollout_temperature": TEMPERATURE, "rollout_top_p": TOP_P, "rollout_top_k": TOP_K}
        sections = {"train": train, "megatron": megatron, "rollout": rollout}
        return SentCase(name, str(folder), str(checkpoint), sections, ranks, str(folder / f"{samples}.samples"))

    tp2 = {"tensor_model_parallel_size": 2}
    cases = [
        case("given", "given", KEPT, {}, 1),
        case("computed", "bare", KEPT, {}, 1),
        case("mixed-tp2", "mixed", KEPT | {"packing": "shared_prompts"}, tp2, 2),
        case("whole", "given", {}, {}, 1),
    ]
    run_cases(folder, 2, cases)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        trained = torch.from_numpy(sample.loss_mask).double()
        renormalised = log_probs(model, sample)[1]
        ratio = (renormalised - renormalised.detach()).exp()
        per_token = -ratio * against_group("grpo", sample, samples) * trained
        loss = loss + per_token.sum() / trained.sum() / len(samples)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    counts = np.concatenate([s.columns[SAMPLING_MASK_COUNTS] for s in samples])
    return Expected(folder, norm.item(), float(counts[counts > 0].mean()))


def write(path: Path, samples: Sequence[Sample]) -> None:
    path.write_text("\n".join(sample.pack().SerializeToString().hex() for sample in samples))


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ["given", "computed", "mixed-tp2"])
def test_a_step_on_what_was_sampled_with_top_p_is_on_policy_and_has_the_gradient_of_the_renormalised_policy(
    expected: Expected, run: str
) -> None:
    (found,) = metrics(expected.folder / run)
    assert found["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert found["log_prob_diff/max"] < 1e-4
    assert found["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)
    assert found["sampling_mask/kept"] == pytest.approx(expected.kept, rel=1e-3)
    assert found["sampling_mask/outside"] == 0.0


@pytest.mark.ranks
def test_without_the_flag_the_same_samples_are_far_from_on_policy(expected: Expected) -> None:
    (found,) = metrics(expected.folder / "whole")
    assert found["ratio/max"] < 0.9
    assert "sampling_mask/kept" not in found
