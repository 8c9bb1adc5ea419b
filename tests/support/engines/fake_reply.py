"""Answers of /generate, as SGLang makes them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any


def reply_of(
    scores: Sequence[tuple[float, int, None]], made: Sequence[int], versions: Sequence[str], finish: str | None
) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return {
        "output_ids": list(made),
        "meta_info": {
            "finish_reason": {"type": finish} if finish else None,
            "input_token_logprobs": list(scores),
            "prompt_tokens": len(scores),
            "completion_tokens": len(made),
            "cached_tokens": 0,
            "output_token_logprobs": [[-(token % 7 + 1) / 10, token, None] for token in made],
            "weight_version": versions[-1] if versions else "0",
            **({"weight_versions": spans} if finish else {}),  # as SGLang: not in mid-stream
        },
    }


def routed_of(tokens: Sequence[int], version: int) -> str:
    """As SGLang: two layers, one expert each, for every token but the last; they follow from token and weights."""
    numbers = [number for token in tokens[:-1] for number in (token % 4, (token + version) % 4)]
    return b64encode(b"".join(number.to_bytes(4, "little") for number in numbers)).decode()
