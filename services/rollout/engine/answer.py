"""Reads an engine's response as a whole: a wrong one is a BadAnswer of one kind, and nothing of it is used.

An engine is a program that may be broken, overloaded or of another version. Its numbers become training data, so every
one of them is checked here against the request.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.errors import InvalidArgument, Unavailable
from headrace.sample_checks import LOG_PROB_SLACK, MIN_LOG_PROB

_MAX_EXPERT = np.iinfo(np.int16).max
_LONGEST_NAME = 200
_REFUSED_STATUS = range(400, 500)
_RETRYABLE_STATUS = (408, 429)
_REFUSAL_TYPE = "BadRequestError"
# SGLang also refuses an input longer than its context by an abort that has a message and no status code.
_TOO_LONG = re.compile(r"longer than|exceeds? the (maximum|model|context)|context length", re.IGNORECASE)


class BadAnswer(Unavailable):
    """An engine's response is impossible. `kind` is counted; `name` are the weights that the response names."""

    def __init__(self, kind: str, message: str, name: str | None = None) -> None:
        super().__init__(f"bad answer ({kind}): {message}", reason="ENGINE_BAD_ANSWER", kind=kind)
        self.kind = kind
        self.name = name


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


def parse(body: bytes | str) -> Mapping[str, Any]:
    """Raises BadAnswer unless the body is a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("not_json", f"{type(error).__name__} in {body[:80]!r}") from error
    return _mapping(value, "the answer")


def read_response(reply: Mapping[str, Any], asked: Asked) -> EngineResponse:
    """Reads a response of /generate. Raises BadAnswer, or InvalidArgument when the engine refuses the request."""
    if "error" in reply:
        raise _refusal(reply["error"])
    if reply.get("success", True) is not True:
        raise BadAnswer("not_successful", f"success is {_shown(reply['success'])}: {_shown(reply.get('message'))}")
    meta = _mapping(reply.get("meta_info"), "meta_info")
    name = _name(meta.get("weight_version"))
    try:
        return _read(reply, meta, asked)
    except BadAnswer as error:
        error.name = name
        raise


def read_scores(reply: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Returns log-probs of all of `tokens` but the first. Raises BadAnswer for scores of other tokens."""
    if reply.get("success", True) is not True:
        raise BadAnswer("not_successful", f"success is {_shown(reply['success'])}: {_shown(reply.get('message'))}")
    meta = _mapping(reply.get("meta_info"), "meta_info")
    pairs = meta.get("input_token_logprobs")
    if not isinstance(pairs, list) or len(pairs) != len(tokens):
        found = len(pairs) if isinstance(pairs, list) else type(pairs).__name__
        raise BadAnswer("scores_count", f"{found} input_token_logprobs for {len(tokens)} tokens")
    if [_pair(pair)[1] for pair in pairs] != list(tokens):
        raise BadAnswer("scores_of_other_tokens", "input_token_logprobs are of other tokens than were asked about")
    return [_log_prob(pair[0]) for pair in pairs[1:]]


def read_weights_name(reply: Mapping[str, Any]) -> str:
    """Reads the weights' name from /model_info. Raises BadAnswer."""
    name = reply.get("weight_version")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise BadAnswer("model_info", f"weight_version is {_shown(name)}")
    return name


def read_checksums(reply: Mapping[str, Any], *, may_be_empty: bool = False) -> list[dict[str, str]]:
    """Returns name → checksum for each tensor-parallel rank, empty only where it may be. Raises BadAnswer."""
    ranks = reply.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise BadAnswer("checksums", f"ranks are {_shown(ranks)}")
    found = [_mapping(_mapping(rank, "a rank").get("checksums"), "checksums") for rank in ranks]
    if any(not (rank or may_be_empty) or not all(isinstance(v, str) for v in rank.values()) for rank in found):
        raise BadAnswer("checksums", "a rank without checksums, or with one that is no text")
    return [dict(rank) for rank in found]


def _read(reply: Mapping[str, Any], meta: Mapping[str, Any], asked: Asked) -> EngineResponse:
    finish = _finish(meta)
    tokens = _token_ids(reply.get("output_ids"), asked)
    log_probs = _log_probs(meta, tokens, finish)
    name = _name(meta.get("weight_version"))
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
    return EngineResponse(tokens, log_probs, finish, spans, experts)


def _finish(meta: Mapping[str, Any]) -> Finish | None:
    reason = meta.get("finish_reason", "")
    if reason is None:
        return None
    kind = _mapping(reason, "finish_reason", kind="finish_reason").get("type")
    if not isinstance(kind, str) or kind not in {finish.value for finish in Finish}:
        raise BadAnswer("finish_reason", f"finish_reason.type is {_shown(kind)}")
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
        raise BadAnswer("aborted_with_status", f"status {_shown(status)}: {message}")


def _refusal(error: Any) -> InvalidArgument | BadAnswer:
    details = error if isinstance(error, Mapping) else {"message": error}
    message, code = message_of(details), details.get("code", 400)
    if type(code) is int and code in _REFUSED_STATUS and code not in _RETRYABLE_STATUS:
        return InvalidArgument(f"the engine refused the request: {message}", reason="ENGINE_REFUSED")
    return BadAnswer("error", f"code {_shown(code)}: {message}")


def _token_ids(value: Any, asked: Asked) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadAnswer("output_ids", f"output_ids are of type {type(value).__name__}")
    if len(value) > asked.max_new_tokens:
        raise BadAnswer("too_many_tokens", f"{len(value)} tokens, {asked.max_new_tokens} were asked for")
    limit = (1 << 31) if asked.vocab_size is None else asked.vocab_size
    for token in value:
        if type(token) is not int or not 0 <= token < limit:
            raise BadAnswer("token_id", f"token id {_shown(token)}, the vocabulary has {limit}")
    return tuple(value)


def _log_probs(meta: Mapping[str, Any], tokens: Sequence[int], finish: Finish | None) -> tuple[float, ...]:
    pairs = meta.get("output_token_logprobs")
    if pairs is None and not tokens and finish in (Finish.ABORT, None):
        return ()  # it was aborted, or is asked about, before its first token
    if not isinstance(pairs, list):
        raise BadAnswer("no_log_probs", f"output_token_logprobs are of type {type(pairs).__name__}")
    read = [_pair(pair) for pair in pairs]
    both = min(len(read), len(tokens))
    if [token for _, token in read[:both]] != list(tokens[:both]):
        raise BadAnswer("log_probs_of_other_tokens", "output_token_logprobs are of other tokens than output_ids")
    return tuple(_log_prob(value) for value, _ in read)


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) < 2:
        raise BadAnswer("log_prob_shape", f"a log-prob is {_shown(value)}, not [log-prob, token id, text]")
    return value[0], value[1]


def _log_prob(value: Any) -> float:
    if type(value) not in (float, int) or not MIN_LOG_PROB <= value <= LOG_PROB_SLACK:  # NaN is not either
        raise BadAnswer("log_prob", f"a log-prob is {_shown(value)}, must be {MIN_LOG_PROB:g} to 0")
    return min(float(value), 0.0)


def _spans(meta: Mapping[str, Any]) -> tuple[NamedSpan, ...]:
    """Reads the spans, which must cover the tokens from the first on, without gaps and overlaps."""
    value = meta.get("weight_versions")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadAnswer("weight_versions", f"weight_versions are of type {type(value).__name__}")
    spans: list[NamedSpan] = []
    for item in value:
        fields = _mapping(item, "a weight_versions item", kind="weight_versions")
        name, start, end = _name(fields.get("version")), fields.get("start"), fields.get("end")
        place = spans[-1].end if spans else 0
        if name is None or type(start) is not int or type(end) is not int or start != place or end < start:
            raise BadAnswer(
                "weight_versions", f"{_shown(name)}, {_shown(start)} to {_shown(end)} follows token {place}"
            )
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


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None


def message_of(details: Mapping[str, Any]) -> str:
    """Returns the engine's error message, cut; empty without one."""
    message = details.get("message")
    return message[:500] if isinstance(message, str) else ""


def _shown(value: Any) -> str:
    """Shows any value in a message: short, and safe for deep nesting."""
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"of type {type(value).__name__}"


def _mapping(value: Any, what: str, *, kind: str = "not_an_object") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadAnswer(kind, f"{what} is of type {type(value).__name__}, not an object")
    return value
