"""Log-probs and entropy from divided vocabularies against log_softmax of whole rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from services.trainer.algorithms import vocab_parallel
from services.trainer.algorithms.vocab_parallel import log_probs_and_entropy

TEMPERATURE = 0.7


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, 12, (2, 5), generator=generator)


def whole(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, target[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def upstream(shape: torch.Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()


def values_and_gradient(function: object, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    log_probs, entropy = function(logits, target)  # type: ignore[operator]
    first, second = upstream(target.shape)
    (log_probs * first + entropy * second).sum().backward()
    assert logits.grad is not None
    return log_probs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 26])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    logits, target = example()
    found = values_and_gradient(lambda x, t: log_probs_and_entropy(x, t, TEMPERATURE, None), logits, target)
    expected = values_and_gradient(lambda x, t: whole(x, t, TEMPERATURE), logits, target)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_passes_gradcheck(output: int) -> None:
    logits, target = example()
    assert torch.autograd.gradcheck(
        lambda x: log_probs_and_entropy(x, target, TEMPERATURE, None)[output], logits.requires_grad_()
    )


def test_bfloat16_logits_give_float32_values_and_bfloat16_gradients() -> None:
    logits, target = example(torch.bfloat16)
    log_probs, _, gradient = values_and_gradient(
        lambda x, t: log_probs_and_entropy(x, t, TEMPERATURE, None), logits, target
    )
    assert (log_probs.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(log_probs.double(), whole(logits.double(), target, TEMPERATURE)[0], rtol=1e-5, atol=1e-5)


def test_huge_logits_and_excluded_tokens_stay_finite() -> None:
    logits = torch.tensor([[3e4, 3e4 - 1.0, -torch.inf, -3e4]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1]), 1.0, None)
    (log_probs + entropy).sum().backward()
    expected = torch.tensor([1.0, 0.0]).log_softmax(0)
    assert log_probs.item() == pytest.approx(expected[1].item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-(expected.exp() * expected).sum().item(), rel=1e-5)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def shard_of_rank(rank: int, address: str, logits: Tensor, target: Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    share = logits.chunk(2, dim=-1)[rank]
    found = values_and_gradient(lambda x, t: log_probs_and_entropy(x, t, TEMPERATURE, dist.group.WORLD), share, target)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_with_half_the_vocabulary_each_agree_with_one_that_has_it_all(tmp_path: Path) -> None:
    logits, target = example()
    logits[0, 0, :6] = -torch.inf  # one rank's share of a row may be excluded altogether
    target[0, 0] = 7
    arguments = (f"file://{tmp_path}/rendezvous", logits, target, str(tmp_path))
    mp.spawn(shard_of_rank, args=arguments, nprocs=2)  # type: ignore[no-untyped-call]
    expected = values_and_gradient(lambda x, t: log_probs_and_entropy(x, t, TEMPERATURE, None), logits, target)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for log_probs, entropy, _ in ranks:
        torch.testing.assert_close(log_probs, expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(entropy, expected[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([r[2] for r in ranks], dim=-1), expected[2], rtol=1e-9, atol=1e-11)
