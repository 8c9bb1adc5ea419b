"""Reads an engine's response as a whole: a wrong one is a BadAnswer of one kind, and nothing of it is used.

An engine is a program that may be broken, overloaded or of another version. Its numbers become training data, so every
one of them is checked here against the request.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.errors import InvalidArgument
from services.rollout.engine.answers.bad_answer import (
    BadAnswer,
    message_of,
    read_log_prob,
    read_name,
    read_pair,
    require_object,
    shown,
)
from services.rollout.engine.answers.counts import NO_COUNTS, EngineCounts, read_counts

_MAX_EXPERT = np.iinfo(np.int16).max
_REFUSED_STATUS = range(400, 500)
_RETRYABLE_STATUS = (408, 429)
_REFUSAL_TYPE = "BadRequestError"
# SGLang also refuses an input longer than its context by an abort that has a message and no status code.
_TOO_LONG = re.compile(r"longer than|exceeds? the (maximum|model|context)|context length", re.IGNORECASE)


class Finish(StrEnum):
    """The reason why a generation ended. ABORT can be continued from its tokens."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"

    @property
    def is_final(self) -> bool:
        """False when the generation can be continued."""
        return self is not Finish.ABORT


@dataclass(frozen=True, slots=True)
class NamedSpan:
    """Response tokens [start, end) were sampled with the weights of that name."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that a response of /generate must fit. Without `vocab_size`, token ids only have to fit int32."""

    num_prompt_tokens: int
    max_new_tokens: int
    vocab_size: int | None = None
    has_images: bool = False
    """The prompt has images, whose embeddings the engine counts by itself."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """Response tokens, their log-probs and the names of the weights that sampled them.

    `finish` is None in mid-stream, where SGLang says only which weights it holds now: one span has that name.
    `routed_experts` are int32, little-endian, token by token from the prompt's first to the last but one, layer by
    layer; None where the request did not ask for them.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish | None
    spans: tuple[NamedSpan, ...]
    routed_experts: bytes | None = None
    counts: EngineCounts = NO_COUNTS


def read_response(reply: Mapping[str, Any], asked: Asked) -> EngineResponse:
    """Reads a response of /generate. Raises BadAnswer, or InvalidArgument when the engine refuses the request."""
    if "error" in reply:
        raise _refusal(reply["error"])
    if reply.get("success", True) is not True:
        raise BadAnswer("not_successful", f"success is {shown(reply['success'])}: {shown(reply.get('message'))}")
    meta = require_object(reply.get("meta_info"), "meta_info")
    name = read_name(meta.get("weight_version"))
    try:
        return _read(reply, meta, asked)
    except BadAnswer as error:
        error.name = name
        raise


def _read(reply: Mapping[str, Any], meta: Mapping[str, Any], asked: Asked) -> EngineResponse:
    finish = _finish(meta)
    if asked.has_images:
        _require_same_prompt(meta, asked)
    tokens = _token_ids(reply.get("output_ids"), asked)
    log_probs = _log_probs(meta, tokens, finish)
    name = read_name(meta.get("weight_version"))
    if finish is None and name is not None and meta.get("weight_versions") is None:  # SGLang tells them at the end
        spans: tuple[NamedSpan, ...] = (NamedSpan(name, 0, len(tokens)),)
    else:
        spans = _spans(meta)
    covered = spans[-1].end if spans else 0
    if finish is None:  # in mid-stream SGLang sends lists that grow while it sends them
        length = min(len(tokens), len(log_probs), covered)
        tokens, log_probs, spans = tokens[:length], log_probs[:length], spans_until(spans, length)
    elif len(log_probs) != len(tokens):
        raise BadAnswer("log_prob_count", f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    elif covered != len(tokens):
        raise BadAnswer("weight_versions", f"weight_versions cover {covered} of {len(tokens)} tokens")
    if finish in (Finish.STOP, Finish.LENGTH) and not tokens:
        raise BadAnswer("no_tokens", f"a response that ended by {finish} without a token")
    experts = _experts(meta, asked.num_prompt_tokens + len(tokens) - 1, is_whole=finish is not None)
    return EngineResponse(tokens, log_probs, finish, spans, experts, read_counts(meta))


def _require_same_prompt(meta: Mapping[str, Any], asked: Asked) -> None:
    """An image of another size there has other embeddings than those that would be trained."""
    if meta.get("prompt_tokens") != asked.num_prompt_tokens:
        raise InvalidArgument(
            f"the engine made {shown(meta.get('prompt_tokens'))} tokens of the prompt and its images, the checkpoint's "
            f"image processor made {asked.num_prompt_tokens} here: give both the same version of transformers",
            reason="OTHER_IMAGE_TOKENS",
        )


def _finish(meta: Mapping[str, Any]) -> Finish | None:
    reason = meta.get("finish_reason", "")
    if reason is None:
        return None
    kind = require_object(reason, "finish_reason", kind="finish_reason").get("type")
    if not isinstance(kind, str) or kind not in {finish.value for finish in Finish}:
        raise BadAnswer("finish_reason", f"finish_reason.type is {shown(kind)}")
    if kind == Finish.ABORT:
        _require_pause(reason)
    return Finish(kind)


def _require_pause(reason: Mapping[str, Any]) -> None:
    """Accepts an abort by a pause, which can be continued; one with a status is a refusal or a failure."""
    message, status = message_of(reason), reason.get("status_code")
    is_refused = reason.get("err_type") == _REFUSAL_TYPE or _TOO_LONG.search(message)
    if is_refused or (type(status) is int and status in _REFUSED_STATUS and status not in _RETRYABLE_STATUS):
        raise InvalidArgument(f"the engine refused the request: {message}", reason="ENGINE_REFUSED")
    if status is not None:
        raise BadAnswer("aborted_with_status", f"status {shown(status)}: {message}")


def _refusal(error: Any) -> InvalidArgument | BadAnswer:
    details = error if isinstance(error, Mapping) else {"message": error}
    message, code = message_of(details), details.get("code", 400)
    if type(code) is int and code in _REFUSED_STATUS and code not in _RETRYABLE_STATUS:
        return InvalidArgument(f"the engine refused the request: {message}", reason="ENGINE_REFUSED")
    return BadAnswer("error", f"code {shown(code)}: {message}")


def _token_ids(value: Any, asked: Asked) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadAnswer("output_ids", f"output_ids are of type {type(value).__name__}")
    if len(value) > asked.max_new_tokens:
        raise BadAnswer("too_many_tokens", f"{len(value)} tokens, {asked.max_new_tokens} were asked for")
    limit = (1 << 31) if asked.vocab_size is None else asked.vocab_size
    for token in value:
        if type(token) is not int or not 0 <= token < limit:
            raise BadAnswer("token_id", f"token id {shown(token)}, the vocabulary has {limit}")
    return tuple(value)


def _log_probs(meta: Mapping[str, Any], tokens: Sequence[int], finish: Finish | None) -> tuple[float, ...]:
    pairs = meta.get("output_token_logprobs")
    if pairs is None and not tokens and finish in (Finish.ABORT, None):
        return ()  # it was aborted, or is asked about, before its first token
    if not isinstance(pairs, list):
        raise BadAnswer("no_log_probs", f"output_token_logprobs are of type {type(pairs).__name__}")
    read = [read_pair(pair) for pair in pairs]
    both = min(len(read), len(tokens))
    if [token for _, token in read[:both]] != list(tokens[:both]):
        raise BadAnswer("log_probs_of_other_tokens", "output_token_logprobs are of other tokens than output_ids")
    return tuple(read_log_prob(value) for value, _ in read)


def _spans(meta: Mapping[str, Any]) -> tuple[NamedSpan, ...]:
    """Reads the spans, which must cover the tokens from the first on, without gaps and overlaps."""
    value = meta.get("weight_versions")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadAnswer("weight_versions", f"weight_versions are of type {type(value).__name__}")
    spans: list[NamedSpan] = []
    for item in value:
        fields = require_object(item, "a weight_versions item", kind="weight_versions")
        name, start, end = read_name(fields.get("version")), fields.get("start"), fields.get("end")
        place = spans[-1].end if spans else 0
        if name is None or type(start) is not int or type(end) is not int or start != place or end < start:
            raise BadAnswer("weight_versions", f"{shown(name)}, {shown(start)} to {shown(end)} follows token {place}")
        if end > start:
            spans.append(NamedSpan(name, start, end))
    return tuple(spans)


def spans_until(spans: Sequence[NamedSpan], length: int) -> tuple[NamedSpan, ...]:
    """Returns the spans of the first `length` tokens."""
    return tuple(NamedSpan(s.name, s.start, min(s.end, length)) for s in spans if s.start < length)


def _experts(meta: Mapping[str, Any], num_rows: int, *, is_whole: bool) -> bytes | None:
    value = meta.get("routed_experts")
    if not value:
        return None
    try:
        data = b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise BadAnswer("routed_experts", f"not base64: {error}") from error
    if not is_whole:
        return None  # of tokens that are not all in this answer; the last one has them all
    if num_rows < 1 or len(data) % (4 * num_rows):
        raise BadAnswer("routed_experts", f"{len(data)} bytes for {num_rows} tokens")
    numbers = np.frombuffer(data, dtype="<i4")
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) <= _MAX_EXPERT):
        raise BadAnswer("routed_experts", f"experts from {numbers.min()} to {numbers.max()}")
    return data
