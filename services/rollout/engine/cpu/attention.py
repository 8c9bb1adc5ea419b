"""Attention of SGLang's `torch_native` backend without the work that it repeats, which for a small model is most.

Decoding, SGLang takes one request after the other; here all are computed at once. For new tokens behind a cached prefix
it computes the prefix's attention again and drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_MOST_PADDING = 4
"""Requests are padded to the longest. If that makes them more than so many times as long, SGLang computes them."""


def decoded(original: Callable[..., Any], backend: Any, query: Any, output: Any, *where: Any, **named: Any) -> Any:
    """Fills `output` [requests, heads, size] with the attention of each request's newest token, `query`.

    `where` and `named` are the arguments of SGLang's `_run_sdpa_forward_decode`.
    """
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = where
    longest, requests = int(seq_lens.max()), len(seq_lens)
    if encoder_lens is not None or longest * requests > _MOST_PADDING * int(seq_lens.sum()):
        return original(backend, query, output, *where, **named)
    positions, ends = torch.arange(longest), seq_lens[:, None]
    places = req_to_token[req_pool_indices, :longest]
    places = torch.where(positions < ends, places, places[:, :1]).flatten()  # beyond an end may be anything
    is_seen = (positions < ends) & _in_window(positions, ends - 1, named)

    def cached(values: Any) -> Any:
        """As [requests, heads, positions, size]."""
        found = values.index_select(0, places).to(query.dtype)
        return found.view(requests, longest, *values.shape[1:]).transpose(1, 2)

    # The queries that share a head of keys lie behind each other, as if they were positions.
    found = scaled_dot_product_attention(
        query.view(requests, k_cache.shape[1], -1, query.shape[-1]),
        cached(k_cache),
        cached(v_cache),
        attn_mask=is_seen[:, None, None],
        scale=named["scaling"],
    )
    return output.copy_(found.reshape(output.shape))


def extended(original: Callable[..., Any], backend: Any, query: Any, output: Any, *where: Any, **named: Any) -> Any:
    """Fills `output` [tokens, heads, size] with the attention of all requests' new tokens, `query`.

    `where` and `named` are the arguments of SGLang's `_run_sdpa_forward_extend`.
    """
    k_cache, v_cache, req_to_token, *requests, encoder_lens = where
    if encoder_lens is not None or not named["causal"]:
        return original(backend, query, output, *where, **named)
    start = 0
    for pool, length, prefix, new in zip(*(each.tolist() for each in requests), strict=True):
        places, mask = req_to_token[pool, :length], None
        if prefix or named["sliding_window_size"] is not None:
            positions = torch.arange(length)
            mine = positions[prefix:, None]
            mask = (positions <= mine) & _in_window(positions, mine, named)
        # As [1, heads, positions, size].
        queries, keys, values = (
            each.to(query.dtype).transpose(0, 1)[None]
            for each in (query[start : start + new], k_cache[places], v_cache[places])
        )
        found = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=named["scaling"],
            enable_gqa=named["enable_gqa"],
        )
        output[start : start + new] = found[0].transpose(0, 1)
        start += new
    return output


def _in_window(positions: Any, mine: Any, named: dict[str, Any]) -> Any:
    """True where a key is within the sliding window of a query, if there is one."""
    window = named["sliding_window_size"]
    return torch.tensor(True) if window is None else positions >= mine - window
