"""A program that prints, in JSON, how far attention of CPU engines is from SGLang's own, for each shape and pass.

On its own, because importing SGLang changes torch and transformers for the whole process.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Own

from services.rollout.engine.cpu.attention import decoded, extended

SHAPES = {
    "grouped": (9, 3, 64, 64, None),
    "each its own": (4, 4, 32, 32, None),
    "sliding window": (4, 2, 32, 32, 5),
    "latents": (8, 1, 96, 64, None),
}
"""Heads, heads of keys, sizes of a key and a value, window."""
ENDS = [7, 31, 1, 18]
PREFIXES = [0, 20, 0, 17]


def refuse(*_: Any, **__: Any) -> Any:
    """Stands for SGLang's own, which must not be asked."""
    raise AssertionError


def filled(ends: list[int], key_heads: int, key_size: int, value_size: int) -> tuple[Any, ...]:
    """Caches whose unused places are NaN, the table of places with anything beyond an end, its rows, and the ends."""
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
    return *caches, table, pools, torch.tensor(ends)


def difference(shape: str, is_decoding: bool) -> float:
    heads, key_heads, key_size, value_size, window = SHAPES[shape]
    where = filled(ENDS, key_heads, key_size, value_size)
    named = {"scaling": 0.1, "enable_gqa": heads != key_heads, "causal": not is_decoding, "sliding_window_size": window}
    prefixes = torch.tensor(PREFIXES)
    new = torch.ones_like(prefixes) if is_decoding else torch.tensor(ENDS) - prefixes
    rest = (*where, None) if is_decoding else (*where, prefixes, new, None)
    query = torch.randn(int(new.sum()), heads, key_size)
    ours, own = (torch.full((len(query), heads, value_size), torch.nan) for _ in range(2))
    if is_decoding:
        decoded(refuse, None, query, ours, *rest, **named)
        Own._run_sdpa_forward_decode(Own, query, own, *rest, **named)
    else:
        extended(refuse, None, query, ours, *rest, **named)
        Own._run_sdpa_forward_extend(Own, query, own, *rest, **named)
    return float((ours - own).abs().max())


if __name__ == "__main__":
    decoding = {f"{shape}, decoding": difference(shape, True) for shape in SHAPES}
    print(json.dumps(decoding | {f"{shape}, behind a prefix": difference(shape, False) for shape in SHAPES}))
