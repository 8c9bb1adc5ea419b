"""Attention of all requests at once on a CPU, against SGLang's own, which takes them one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from services.rollout.engine.cpu.attention import decoded

OWN = TorchNativeAttnBackend._run_sdpa_forward_decode


class Refusing:
    """Stands for SGLang's own, which must not be asked."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("heads", "key_heads", "key_size", "value_size", "window"),
    [(9, 3, 64, 64, None), (4, 4, 32, 32, None), (4, 2, 32, 32, 5), (8, 1, 96, 64, None)],
    ids=["grouped", "each its own", "sliding window", "latents"],
)
def test_all_requests_at_once_have_the_attention_of_each_alone(
    heads: int, key_heads: int, key_size: int, value_size: int, window: int | None
) -> None:
    caches, table, pools, lengths, query = made([7, 31, 1, 18], heads, key_heads, key_size, value_size)
    named: dict[str, Any] = {"scaling": 0.1, "enable_gqa": heads != key_heads, "sliding_window_size": window}
    outputs = [torch.full((len(lengths), heads, value_size), torch.nan) for _ in range(2)]
    rest = (*caches, table, pools, lengths, None)
    decoded(Refusing(), TorchNativeAttnBackend, query, outputs[0], *rest, **named)
    OWN(TorchNativeAttnBackend, query, outputs[1], *rest, **named)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=0)


def test_one_long_request_beside_short_ones_is_left_to_sglang() -> None:
    caches, table, pools, lengths, query = made([2, 2, 2, 2, 2, 2, 2, 90], 2, 2, 8, 8)
    asked: list[dict[str, Any]] = []
    tensors = (query, query.clone(), *caches, table, pools, lengths)
    decoded(lambda *_, **named: asked.append(named), None, *tensors, scaling=0.1, enable_gqa=False)
    assert asked == [{"scaling": 0.1, "sliding_window_size": None, "enable_gqa": False}]


def made(ends: list[int], heads: int, key_heads: int, key_size: int, value_size: int) -> tuple[Any, ...]:
    """Caches whose unused places are NaN, the table of places with anything beyond each request's end, and queries."""
    torch.manual_seed(0)
    pools = torch.arange(len(ends)).roll(1)
    places = torch.randperm(400)
    table = places[:1].repeat(len(ends), 128).int()
    caches = [torch.full((400, key_heads, size), torch.nan) for size in (key_size, value_size)]
    used = 1
    for pool, end in zip(pools, ends, strict=True):
        mine = places[used : used + end]
        table[pool, :end] = mine.int()
        for cache in caches:
            cache[mine] = torch.randn(end, *cache.shape[1:])
        used += end
    return caches, table, pools, torch.tensor(ends), torch.randn(len(ends), heads, key_size)
