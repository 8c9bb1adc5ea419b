"""Log-probs and entropy from divided vocabularies against log_softmax of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from services.trainer.rl.algorithms import vocab_parallel
from services.trainer.rl.algorithms.vocab_parallel import KeptTokens, log_probs_and_entropy

TEMPERATURE = 0.7


WIDTH, VOCABULARY, POSITIONS = 6, 12, 10


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    weight = 2 * torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, target[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden, weight, target, TEMPERATURE, None)


def kept_tokens() -> KeptTokens:
    """Some tokens and the target each; position 0 keeps only tokens of the second half, 1 the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    keeps = torch.rand(POSITIONS, VOCABULARY, generator=generator) < 0.4
    keeps[0, :6] = False
    keeps[torch.arange(POSITIONS), far_apart()[2]] = True
    keeps[1] = False
    return KeptTokens(*keeps.nonzero().T)


def renormalised(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook: softmax over all tokens, those that are not kept struck out, the others divided by their sum."""
    kept = kept_tokens()
    keeps = torch.zeros(len(hidden), VOCABULARY, dtype=torch.bool)
    keeps[kept.positions, kept.ids] = True
    keeps[kept.counts(len(hidden)) == 0] = True
    p = (hidden @ weight.T / TEMPERATURE).softmax(-1) * keeps
    p = p / p.sum(-1, keepdim=True)
    return p.gather(-1, target[:, None])[:, 0].log(), -(p * torch.where(keeps, p, 1.0).log()).sum(-1)


def fused_over_kept(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden, weight, target, TEMPERATURE, None, kept_tokens())


def upstream(shape: torch.Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()


Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def values_and_gradients(function: Function, hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = function(hidden, weight, target)
    first, second = upstream(target.shape)
    (log_probs * first + entropy * second).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 26])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    for a, b in zip(values_and_gradients(fused, *example()), values_and_gradients(whole, *example()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 26])
def test_kept_tokens_alone_share_probability_entropy_and_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int
) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, _ = example()
    target = far_apart()[2]
    found = values_and_gradients(fused_over_kept, hidden, weight, target)
    for a, b in zip(found, values_and_gradients(renormalised, hidden, weight, target), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gradients_over_kept_tokens_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", 30)
    hidden, weight, _ = example()
    target = far_apart()[2]
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: fused_over_kept(x, w, target), inputs)


def test_a_token_outside_of_the_kept_ones_gets_no_gradient() -> None:
    hidden, weight, target = example()
    _, _, _, grad = values_and_gradients(
        lambda x, w, t: log_probs_and_entropy(
            x, w, t, TEMPERATURE, None, KeptTokens(torch.arange(POSITIONS).repeat(2), torch.cat((t, (t + 1) % 12)))
        ),
        hidden,
        weight,
        target,
    )
    untouched = sorted(set(range(VOCABULARY)) - {*target.tolist(), *((target + 1) % 12).tolist()})
    assert untouched
    assert not grad[untouched].any()


def test_bfloat16_gives_float32_values_and_bfloat16_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", 30)
    log_probs, _, *gradients = values_and_gradients(fused, *example(torch.bfloat16))
    assert [log_probs.dtype, *(g.dtype for g in gradients)] == [torch.float32, torch.bfloat16, torch.bfloat16]
    hidden, weight, target = example(torch.bfloat16)
    expected = whole(hidden.double(), weight.double(), target)[0]
    torch.testing.assert_close(log_probs.double(), expected, rtol=2e-2, atol=2e-2)


def shard_of_rank(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    vocab_parallel.CHUNK_ELEMENTS = 30  # some positions at a time
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    hidden, weight, target = far_apart()
    share = weight.chunk(2)[rank]
    found = [
        values_and_gradients(
            partial(log_probs_and_entropy, temperature=TEMPERATURE, group=dist.group.WORLD, kept=kept),
            hidden,
            share,
            target,
        )
        for kept in (None, kept_tokens())
    ]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def far_apart() -> tuple[Tensor, Tensor, Tensor]:
    """One rank's share of a row may be out of reach altogether."""
    hidden, weight, target = example()
    hidden[:, 0] = 0
    hidden[0] = torch.eye(WIDTH)[0]
    weight[:6, 0] = -1e4
    target[0] = 7
    return hidden, weight, target


def test_two_ranks_with_half_the_vocabulary_each_agree_with_one_that_has_it_all(tmp_path: Path) -> None:
    spawn(shard_of_rank, args=(f"file://{tmp_path}/rendezvous", str(tmp_path)), nprocs=2)
    both = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    for function, ranks in zip((fused, fused_over_kept), both, strict=True):
        expected = values_and_gradients(function, *far_apart())
        for log_probs, entropy, *_ in ranks:
            torch.testing.assert_close(log_probs, expected[0], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(entropy, expected[1], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(ranks[0][2] + ranks[1][2], expected[2], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat([r[3] for r in ranks]), expected[3], rtol=1e-9, atol=1e-11)
