"""Replies of engines: types that msgspec decodes, and the checks that need the request. A wrong one is a BadAnswer.

An engine is a program that may be broken, overloaded or of another version. Its numbers become training data, so every
one of them is checked here against the request, and nothing of a wrong reply is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field
from numpy.typing import NDArray

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.convert import cache_and_speculation
from headrace.limits import MAX_COUNTER, MAX_ENGINES
from headrace.trajectory import (
    LOG_PROB_SLACK,
    MIN_LOG_PROB,
    SAMPLING_MASK,
    SAMPLING_MASK_COUNTS,
    Sample,
    check_sampling_mask,
    check_token_ids,
)

_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Count = Annotated[int, Meta(ge=0, le=MAX_COUNTER)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
T = TypeVar("T")


class BadAnswer(Unavailable):
    """An engine's response is impossible. `kind` is counted; `name` are the weights that the response names.

    Where a field has another type or range than SGLang gives it, the kind is the field's name.
    """

    def __init__(self, kind: str, message: str, name: str | None = None) -> None:
        super().__init__(f"bad answer ({kind}): {message}", reason="ENGINE_BAD_ANSWER", kind=kind)
        self.kind = kind
        self.name = name


_WRONG_FIELD = re.compile(r"required field `(\w+)`|\$\.(?:meta_info\.)?(\w+)")
_NAME = re.compile(rb'"weight_version"\s*:\s*"([\w.-]{1,200})"', re.ASCII)
_SHOWN_CHARACTERS = 500


def decode(body: bytes, kind: type[T]) -> T:
    """Raises BadAnswer unless the body is JSON of the kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        wrong = _WRONG_FIELD.search(str(error))
        raise BadAnswer(wrong[1] or wrong[2] if wrong else "not_an_object", str(error)[:_SHOWN_CHARACTERS]) from error
    except (ValueError, RecursionError) as error:
        raise BadAnswer("not_json", f"{type(error).__name__} in {body[:80]!r}") from error


class Done(Struct, frozen=True):
    """The reply to a command."""

    success: bool = True
    message: str = ""


class Finish(StrEnum):
    """The reason why a generation ended. ABORT can be continued from its tokens."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"

    @property
    def is_final(self) -> bool:
        """False when the generation can be continued."""
        return self is not Finish.ABORT


class NamedSpan(Struct, frozen=True):
    """Response tokens [start, end) were sampled with the weights of that name."""

    name: _Name = field(name="version")
    start: int
    end: int


class EngineCounts(Struct, frozen=True):
    """Sums over the requests of one response, which nobody trains on; a prompt counts each time that it is sent.

    The speculative ones are SGLang's: drafts that the model agreed with, drafts proposed, verifications.
    """

    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0
    completion_tokens: _Count = 0
    correct_drafts: _Count = field(default=0, name="spec_num_correct_drafts")
    proposed_drafts: _Count = field(default=0, name="spec_num_proposed_drafts")
    verifications: _Count = field(default=0, name="spec_verify_ct")

    def __add__(self, later: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) + getattr(later, name) for name in EngineCounts.__struct_fields__))

    @classmethod
    def of(cls, sample: Sample) -> EngineCounts:
        """Reads the counts of a sample that an earlier lease began."""
        spec, cache = cache_and_speculation(sample)
        return cls(
            cache.total_prompt_tokens,
            cache.cached_tokens,
            spec.completion_token_num,
            spec.spec_accept_token_num,
            spec.spec_draft_token_num,
            spec.spec_verify_ct,
        )

    def hook_fields(self) -> dict[str, Any]:
        """Returns `prefix_cache_info` and `spec_info` as a sample keeps them; without verifications only the first."""
        if not self.prompt_tokens:
            return {}
        cache = {"cached_tokens": self.cached_tokens, "total_prompt_tokens": self.prompt_tokens}
        if not self.verifications:
            return {"prefix_cache_info": cache}
        spec = {
            "spec_accept_token_num": self.correct_drafts,
            "spec_draft_token_num": self.proposed_drafts,
            "spec_verify_ct": self.verifications,
            "completion_token_num": self.completion_tokens,
        }
        return {"prefix_cache_info": cache, "spec_info": spec}


NO_COUNTS = EngineCounts()

_Scored = tuple[float | None, int, Any]
"""Log-prob, token id and text. SGLang writes null for a number that is not finite, and for a prompt's first token."""


class _FinishReason(Struct, frozen=True):
    type: Finish
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class _Meta(EngineCounts, frozen=True):
    finish_reason: _FinishReason | UnsetType | None = UNSET
    weight_version: _Name | None = None
    weight_versions: list[NamedSpan] | None = None
    input_token_logprobs: list[_Scored] | None = None
    output_token_logprobs: list[_Scored] | None = None
    routed_experts: bytes | None = None
    output_token_sampling_mask: list[list[_TokenId]] | None = None
    output_token_sampling_logprobs: list[float | None] | None = None


class _Error(Struct, frozen=True):
    message: str = ""
    code: int = 400


class _Generated(Done, frozen=True):
    """A reply of /generate, or an event of its stream."""

    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: _Error | str | None = None


@dataclass(frozen=True, slots=True)
class ExpectedReply:
    """The request that a response of /generate must fit. Without `vocab_size`, token ids only have to fit int32."""

    num_prompt_tokens: int
    max_new_tokens: int
    vocab_size: int | None = None
    has_images: bool = False
    """The prompt has images, whose embeddings the engine counts by itself."""
    has_sampling_mask: bool = False
    """The engine must say which tokens each one was sampled from."""
    adapter: str = ""
    """The adapter whose tokens they are: the engine names its own weights, which lie below it."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The token ids that each response token was sampled from, as the columns of a sample have them."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]

    def until(self, length: int) -> SamplingMask:
        """Returns that of the first `length` tokens."""
        return SamplingMask(self.ids[: int(self.counts[:length].sum())], self.counts[:length])

    def then(self, later: SamplingMask) -> SamplingMask:
        """Appends that of the tokens that follow."""
        return SamplingMask(np.concatenate((self.ids, later.ids)), np.concatenate((self.counts, later.counts)))

    @classmethod
    def of(cls, kept: Sequence[NDArray[np.int32]]) -> SamplingMask:
        """From the ids of each token."""
        ids = np.concatenate([np.empty(0, np.int32), *kept])
        return cls(ids, np.array([len(each) for each in kept], np.int32))

    @property
    def by_token(self) -> Sequence[NDArray[np.int32]]:
        """The ids of each token."""
        return np.split(self.ids, np.cumsum(self.counts)[:-1])

    @property
    def columns(self) -> dict[str, NDArray[np.int32]]:
        """By their names in a sample."""
        return {SAMPLING_MASK: self.ids, SAMPLING_MASK_COUNTS: self.counts}


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """Response tokens, their log-probs and the names of the weights that sampled them.

    `finish` is None in mid-stream, where SGLang says only which weights it holds now: one span has that name.
    `routed_experts` are int32, little-endian, token by token from the prompt's first to the last but one, layer by
    layer; None where the request did not ask for them. With a `sampling_mask`, log-probs are those of the distribution
    over its tokens alone.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish | None
    spans: tuple[NamedSpan, ...]
    routed_experts: bytes | None = None
    counts: EngineCounts = NO_COUNTS
    sampling_mask: SamplingMask | None = None


def read_response(body: bytes, expected: ExpectedReply) -> EngineResponse:
    """Reads a response of /generate. Raises BadAnswer, or InvalidArgument when the engine refuses the request."""
    try:
        reply = decode(body, _Generated)
        return _response(reply, _meta_of(reply), expected)
    except BadAnswer as error:
        error.name = _name_in(body)
        raise


def read_scores(body: bytes, tokens: Sequence[int]) -> list[float]:
    """Returns log-probs of all of `tokens` but the first. Raises BadAnswer for scores of other tokens."""
    pairs = _meta_of(decode(body, _Generated)).input_token_logprobs
    if pairs is None or len(pairs) != len(tokens):
        raise BadAnswer("scores_count", f"{len(pairs or ())} input_token_logprobs for {len(tokens)} tokens")
    if [token for _, token, _ in pairs] != list(tokens):
        raise BadAnswer("scores_of_other_tokens", "input_token_logprobs are of other tokens than were asked about")
    return [_log_prob(value) for value, _, _ in pairs[1:]]


def _meta_of(reply: _Generated) -> _Meta:
    if reply.error is not None:
        raise _refusal(reply.error)
    if not reply.success:
        raise BadAnswer("not_successful", reply.message[:_SHOWN_CHARACTERS])
    if reply.meta_info is None:
        raise BadAnswer("meta_info", "the answer has no meta_info")
    return reply.meta_info


def _name_in(body: bytes) -> str | None:
    """The weights that a wrong reply names, which may be no JSON."""
    found = _NAME.search(body)
    return found[1].decode() if found else None


def _response(reply: _Generated, meta: _Meta, expected: ExpectedReply) -> EngineResponse:
    finish = _finish(meta)
    if expected.has_images and meta.prompt_tokens != expected.num_prompt_tokens:
        # An image of another size there has other embeddings than those that would be trained.
        raise InvalidArgument(
            f"the engine made {meta.prompt_tokens} tokens of the prompt and its images, the checkpoint's image "
            f"processor made {expected.num_prompt_tokens} here: give both the same version of transformers, and a "
            "tokenizer whose text of a prompt is cut into the same tokens again",
            reason="OTHER_IMAGE_TOKENS",
        )
    tokens = _token_ids(reply.output_ids, expected)
    log_probs = _log_probs(meta, tokens, finish)
    if (
        finish is None and meta.weight_version is not None and meta.weight_versions is None
    ):  # SGLang tells them at the end
        spans: tuple[NamedSpan, ...] = (NamedSpan(meta.weight_version, 0, len(tokens)),)
    else:
        spans = _spans(meta.weight_versions or ())
    covered = spans[-1].end if spans else 0
    if finish is None:  # in mid-stream SGLang sends lists that grow while it sends them
        length = min(len(tokens), len(log_probs), covered)
        tokens, log_probs, spans = tokens[:length], log_probs[:length], _spans_until(spans, length)
    elif len(log_probs) != len(tokens):
        raise BadAnswer("log_prob_count", f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    elif covered != len(tokens):
        raise BadAnswer("weight_versions", f"weight_versions cover {covered} of {len(tokens)} tokens")
    if expected.adapter:
        spans = (NamedSpan(expected.adapter, 0, len(tokens)),) if tokens else ()
    if finish in (Finish.STOP, Finish.LENGTH) and not tokens:
        raise BadAnswer("no_tokens", f"a response that ended by {finish} without a token")
    # In mid-stream, experts are of tokens that are not all in this reply; the last reply has them all.
    experts = _experts(meta.routed_experts, expected.num_prompt_tokens + len(tokens) - 1) if finish else None
    counts = EngineCounts(*(getattr(meta, name) for name in EngineCounts.__struct_fields__))
    if not (expected.has_sampling_mask and tokens):
        return EngineResponse(tokens, log_probs, finish, spans, experts, counts)
    mask = _sampling_mask(meta, tokens, expected)
    renormalised = tuple(_log_prob(value) for value in meta.output_token_sampling_logprobs or ())
    if len(renormalised) != len(tokens):
        raise BadAnswer("sampling_mask", f"{len(renormalised)} sampling log-probs for {len(tokens)} tokens")
    return EngineResponse(tokens, renormalised, finish, spans, experts, counts, mask)


_REFUSED_STATUS = range(400, 500)
_RETRYABLE_STATUS = (408, 429)
_REFUSAL_TYPE = "BadRequestError"
# SGLang also refuses an input longer than its context by an abort that has a message and no status code.
_TOO_LONG = re.compile(r"longer than|exceeds? the (maximum|model|context)|context length", re.IGNORECASE)


def _finish(meta: _Meta) -> Finish | None:
    reason = meta.finish_reason
    if reason is None:
        return None
    if isinstance(reason, UnsetType):
        raise BadAnswer("finish_reason", "the answer has no finish_reason")
    if reason.type is Finish.ABORT:
        _require_pause(reason)
    return reason.type


def _require_pause(reason: _FinishReason) -> None:
    """Accepts an abort by a pause, which can be continued; one with a status is a refusal or a failure."""
    if reason.err_type == _REFUSAL_TYPE or _TOO_LONG.search(reason.message) or _is_refusal(reason.status_code):
        raise InvalidArgument(_refused(reason.message), reason="ENGINE_REFUSED")
    if reason.status_code is not None:
        message = reason.message[:_SHOWN_CHARACTERS]
        raise BadAnswer("aborted_with_status", f"status {reason.status_code}: {message}")


def _refusal(error: _Error | str) -> InvalidArgument | BadAnswer:
    details = _Error(error) if isinstance(error, str) else error
    if _is_refusal(details.code):
        return InvalidArgument(_refused(details.message), reason="ENGINE_REFUSED")
    return BadAnswer("error", f"code {details.code}: {details.message[:_SHOWN_CHARACTERS]}")


def _is_refusal(status: int | None) -> bool:
    return status in _REFUSED_STATUS and status not in _RETRYABLE_STATUS


def _refused(message: str) -> str:
    return f"the engine refused the request: {message[:_SHOWN_CHARACTERS]}"


def _token_ids(tokens: Sequence[int] | None, expected: ExpectedReply) -> tuple[int, ...]:
    if tokens is None:
        raise BadAnswer("output_ids", "the answer has no output_ids")
    if len(tokens) > expected.max_new_tokens:
        raise BadAnswer("too_many_tokens", f"{len(tokens)} tokens, {expected.max_new_tokens} were asked for")
    limit = (1 << 31) if expected.vocab_size is None else expected.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < limit:
        raise BadAnswer("token_id", f"token ids {min(tokens)} to {max(tokens)}, the vocabulary has {limit}")
    return tuple(tokens)


def _log_probs(meta: _Meta, tokens: Sequence[int], finish: Finish | None) -> tuple[float, ...]:
    pairs = meta.output_token_logprobs
    if pairs is None and not tokens and finish in (Finish.ABORT, None):
        return ()  # it was aborted, or is asked about, before its first token
    if pairs is None:
        raise BadAnswer("no_log_probs", "the answer has no output_token_logprobs")
    both = min(len(pairs), len(tokens))
    if [token for _, token, _ in pairs[:both]] != list(tokens[:both]):
        raise BadAnswer("log_probs_of_other_tokens", "output_token_logprobs are of other tokens than output_ids")
    return tuple(_log_prob(value) for value, _, _ in pairs)


def _log_prob(value: float | None) -> float:
    if value is None or not MIN_LOG_PROB <= value <= LOG_PROB_SLACK:
        raise BadAnswer("log_prob", f"a log-prob is {value}, must be {MIN_LOG_PROB:g} to 0")
    return min(value, 0.0)


def _spans(given: Sequence[NamedSpan]) -> tuple[NamedSpan, ...]:
    """Requires that they cover the tokens from the first on, without gaps and overlaps; leaves empty ones out."""
    end = 0
    for span in given:
        if span.start != end or span.end < end:
            raise BadAnswer("weight_versions", f"{span.name!r}, {span.start} to {span.end}, follows token {end}")
        end = span.end
    return tuple(span for span in given if span.end > span.start)


def _spans_until(spans: Sequence[NamedSpan], length: int) -> tuple[NamedSpan, ...]:
    return tuple(NamedSpan(span.name, span.start, min(span.end, length)) for span in spans if span.start < length)


_MAX_EXPERT = np.iinfo(np.int16).max


def _experts(data: bytes | None, num_rows: int) -> bytes | None:
    if not data:
        return None
    if num_rows < 1 or len(data) % (4 * num_rows):
        raise BadAnswer("routed_experts", f"{len(data)} bytes for {num_rows} tokens")
    numbers = np.frombuffer(data, dtype="<i4")
    if not (int(numbers.min()) >= 0 and int(numbers.max()) <= _MAX_EXPERT):
        raise BadAnswer("routed_experts", f"experts from {numbers.min()} to {numbers.max()}")
    return data


def _sampling_mask(meta: _Meta, tokens: Sequence[int], expected: ExpectedReply) -> SamplingMask:
    rows = meta.output_token_sampling_mask or []
    mask = SamplingMask(
        np.fromiter((token for row in rows for token in row), np.int32), np.array([len(row) for row in rows], np.int32)
    )
    try:
        check_sampling_mask("", np.asarray(tokens, np.int32), mask.columns)
        check_token_ids(SAMPLING_MASK, mask.ids, expected.vocab_size)
    except InvalidArgument as error:
        raise BadAnswer("sampling_mask", error.message) from error
    if not mask.counts.all():
        raise BadAnswer("sampling_mask", "a token without the tokens that it was sampled from")
    return mask


class ModelInfo(Struct, frozen=True):
    """The reply of /model_info."""

    weight_version: _Name


class ServerInfo(Struct, frozen=True):
    """The reply of /server_info."""

    tp_size: Annotated[int, Meta(ge=1)]
    pp_size: Annotated[int, Meta(ge=1)] = 1
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 0


class _RankChecksums(Struct, frozen=True):
    checksums: dict[str, str]


class Checksums(Done, frozen=True, kw_only=True):
    """The reply of /weights_checker: name → checksum, for each tensor-parallel rank."""

    ranks: Annotated[list[_RankChecksums], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests, the share of the key-value cache that they use, and how many were taken back from running."""

    running: int
    waiting: int
    cache_usage: float
    retracted: int = 0


class _Queues(Struct, frozen=True):
    retracted: _Count = 0


class _RankLoad(Struct, frozen=True):
    num_running_reqs: _Count
    num_waiting_reqs: _Count
    token_usage: Annotated[float, Meta(ge=0, le=1)]
    queues: _Queues | None = None


class _Loads(Struct, frozen=True):
    loads: Annotated[list[_RankLoad], Meta(min_length=1, max_length=MAX_ENGINES)]


def read_load(body: bytes) -> EngineLoad:
    """Adds up the data-parallel ranks of /v1/loads; the fullest cache counts. Raises BadAnswer."""
    ranks = decode(body, _Loads).loads
    return EngineLoad(
        sum(rank.num_running_reqs for rank in ranks),
        sum(rank.num_waiting_reqs for rank in ranks),
        max(rank.token_usage for rank in ranks),
        sum(rank.queues.retracted for rank in ranks if rank.queues),
    )
