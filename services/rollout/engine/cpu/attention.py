"""Attention of SGLang's `torch_native` backend for a step of decoding: all requests at once.

SGLang's own takes one request after the other, which for a small model is most of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

DECODE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"
_MOST_PADDING = 4
"""Requests whose padded length is more than so many times their own lengths are left to SGLang."""


def decoded(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    encoder_lens: Any = None,
    *,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **others: Any,
) -> Any:
    """Fills `output` [requests, heads, size] with the attention of each request's newest token, `query`."""
    longest, requests = int(seq_lens.max()), len(seq_lens)
    if encoder_lens is not None or longest * requests > _MOST_PADDING * int(seq_lens.sum()):
        named = {"scaling": scaling, "sliding_window_size": sliding_window_size, **others}
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **named
        )
    positions, ends = torch.arange(longest), seq_lens[:, None]
    is_seen = positions < ends
    if sliding_window_size is not None:
        is_seen &= positions >= ends - 1 - sliding_window_size
    places = req_to_token[req_pool_indices, :longest]
    places = torch.where(positions < ends, places, places[:, :1]).flatten()  # beyond an end may be anything

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
        scale=scaling,
    )
    return output.copy_(found.reshape(output.shape))
