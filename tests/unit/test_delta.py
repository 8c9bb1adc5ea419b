"""Deltas of weights: their bytes, and what an engine's loader makes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.delta import PREFIX, Change, pack, unpack
from headrace.errors import InvalidArgument
from services.rollout.engine.deltas import ChangedTensor, expanded
from services.trainer.weights.buckets import RollbackCopy

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}
DTYPES = pytest.mark.parametrize("dtype", BITS)
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t,
    "a column rank's": lambda t: t.narrow(0, 3, 4),
    "a row rank's": lambda t: t.narrow(1, 2, 5),
    "both": lambda t: t.narrow(0, 3, 4).narrow(1, 1, 3),
    "transposed": lambda t: t.t(),
    "an expert's": lambda t: t.view(2, 6, 8)[1],
    "a chunk": lambda t: t.chunk(2, dim=1)[1],
    "a slice": lambda t: t[2:5, 1:3],
    "copied": lambda t: t.contiguous().narrow(0, 1, 2),
    "fused by the loader": lambda t: torch.cat([t, t], dim=0),
    "moved": lambda t: t.to("cpu").reshape(6, 16),
}


def two_versions(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    old = torch.randn(12, 8).to(dtype)
    new = old.clone()
    new.view(BITS[dtype])[torch.rand(12, 8) < 0.2] ^= 1
    return old, new


def change_of(old: Tensor, new: Tensor) -> Change:
    kept = RollbackCopy(torch.device("cpu"))
    kept.keep([("x", old)])
    return kept.changed("x", new)


def are_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


@DTYPES
@pytest.mark.parametrize("cut", CUTS)
def test_a_loader_that_cuts_a_tensor_and_copies_the_cut_writes_what_changed_of_it(dtype: torch.dtype, cut: str) -> None:
    old, new = two_versions(dtype)
    delta = torch.frombuffer(bytearray(pack([change_of(old, new)])), dtype=torch.uint8)
    other = torch.ones(1)
    (name, changed), kept = expanded([(f"{PREFIX}0", delta), ("other", other)])
    assert (name, kept) == ("x", ("other", other))
    assert (changed.shape, changed.dtype, changed.device) == (old.shape, dtype, old.device)
    loaded = CUTS[cut](old).clone()
    torch.nn.Parameter(loaded, requires_grad=False).data.copy_(CUTS[cut](changed))
    assert are_equal(loaded, CUTS[cut](new))
    wide = torch.stack([CUTS[cut](old), CUTS[cut](old)], dim=-1)
    wide[..., 1] = CUTS[cut](changed)
    assert are_equal(wide[..., 1], CUTS[cut](new)), "a parameter that does not lie in one piece"
    assert are_equal(wide[..., 0], CUTS[cut](old))


@DTYPES
def test_what_is_kept_and_changed_is_what_was_compared(dtype: torch.dtype) -> None:
    old, new = two_versions(dtype)
    kept = RollbackCopy(torch.device("cpu"))
    kept.keep([("x", old)])
    kept.change([kept.changed("x", new)])
    assert are_equal(dict(kept.tensors())["x"], new)
    assert kept.changed("x", new).positions.size == 0


def test_a_zeros_sign_is_a_change_and_none_is_no_bytes_of_a_tensor() -> None:
    change = change_of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert change.positions.tolist() == [0]
    assert unpack(pack([change_of(torch.ones(3), torch.ones(3))]), 1 << 20) == []


def test_bytes_that_are_no_delta_are_refused() -> None:
    positions = np.arange(5, dtype=np.uint32)
    delta = pack([Change("x", "bfloat16", (9,), positions, np.zeros(5, np.uint16))])
    for damaged in (b"", b"no delta", delta[:-3], delta[:20] + delta[24:]):
        with pytest.raises(InvalidArgument):
            unpack(damaged, 1 << 20)
    with pytest.raises(InvalidArgument, match="send the whole"):
        unpack(delta, 10)


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="x has values that are not numbers"):
        ChangedTensor.of(change_of(torch.ones(2), torch.tensor([1.0, torch.nan])), torch.device("cpu"))
