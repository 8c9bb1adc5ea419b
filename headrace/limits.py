"""The limits of what peers, files and people write, and the checks that hold them. docs/protocol.md shows the limits.

A peer that exceeds one is refused with INVALID_ARGUMENT (or RESOURCE_EXHAUSTED where others hold what it needs), and
nothing of its call is kept. A test compares the limits with the document.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from headrace.errors import InvalidArgument

# Text

MAX_ID_CHARACTERS: Final = 512
"""Ids of prompts, samples, groups, leases, producers and requests."""
MAX_NAME_CHARACTERS: Final = 128
"""Names of streams, columns, tags, scorers and reward parts; reasons for programs; keys of a prompt file."""
MAX_TEXT_CHARACTERS: Final = 2_048
"""Messages for people; longer ones are cut."""
MAX_PATH_CHARACTERS: Final = 4_096
"""Paths of files."""
MAX_JSON_BYTES: Final = 1 << 20
"""One metadata_json, tools_json or extra_json."""
MAX_JSON_DEPTH: Final = 64
"""Objects and arrays inside of each other."""

# Numbers

MAX_COUNTER: Final = 1 << 53
"""Steps, epochs, policy versions, positions and byte counts: what a JSON number holds exactly."""
MAX_STEPS_AHEAD: Final = 1_000_000
"""A rewind or a policy version may be so far ahead of what the ledger knows: one that was restored is behind."""
MAX_WAIT_SECONDS: Final = 86_400.0
"""Longer waits are cut to it, and to the deadline of the call."""
MAX_LEASE_SECONDS: Final = 30 * 86_400.0
"""A lease unless it is renewed."""
PEER_WAIT_SECONDS: Final = 300.0
"""How long the trainer waits for a service that does not answer, and rollout for a score."""

LAST_PORT: Final = 65_535
"""TCP's last one."""

# One port: gRPC's and uvicorn's own limits

MAX_CONNECTIONS: Final = 8_192
"""Connections to a gRPC port."""
MAX_HANDSHAKE_SECONDS: Final = 10.0
"""The time from a connection's start to the end of its TLS handshake and HTTP/2 preface."""
MAX_IDLE_SECONDS: Final = 600.0
"""A gRPC connection without a call is closed; clients open another."""
MAX_RECEIVE_SECONDS: Final = 300.0
"""The time from the start of a gRPC call to the end of its request."""
MAX_METADATA_BYTES: Final = 16_384
"""Metadata of a gRPC call."""
MAX_STREAMS_PER_CONNECTION: Final = 8_192
"""Calls on one gRPC connection at once, those included that were reset and are not cleared away yet.

A client waits with further ones; in a burst some get UNAVAILABLE and may ask again."""
MAX_HTTP_HEADER_BYTES: Final = 32_768
"""The head of an HTTP request: its first line and all headers."""
MAX_HTTP_BODY_BYTES: Final = 16 << 20
"""The body of an HTTP request."""
MAX_HTTP_BODY_SECONDS: Final = 60.0
"""The time from the head to the end of the body."""

# One message

MAX_MESSAGE_BYTES: Final = 256 << 20
"""What gRPC takes at all, either way; each kind of request has its own limit below it."""
MAX_REQUEST_BYTES: Final = 16 << 20
"""A request that is not named below."""
MAX_SUBMIT_REQUEST_BYTES: Final = 32 << 20
"""A SubmitPrompts request."""
MAX_RELEASE_REQUEST_BYTES: Final = 64 << 20
"""A ReleaseLeases request."""
MAX_PUT_REQUEST_BYTES: Final = 256 << 20
"""A PutGroups request."""
MAX_SCORE_REQUEST_BYTES: Final = 64 << 20
"""A Score request."""
MAX_ANSWER_BYTES: Final = 3 << 20
"""Answers are filled up to here, below the 4 MiB that gRPC takes by default; a larger item comes alone."""
MAX_BATCH_ANSWER_BYTES: Final = 32 << 20
"""The same for the envelopes of a LeaseBatch."""
MAX_ERROR_BYTES: Final = 2_048
"""The message of an error, as it is encoded in a header; longer ones are cut."""

# One call of the buffer

MAX_GROUPS_PER_LEASE: Final = 1_000
"""LeaseGroups; more are cut to it."""
MAX_LEASES_PER_CALL: Final = 10_000
"""RenewLeases."""
MAX_RELEASES_PER_CALL: Final = 2_048
"""ReleaseLeases."""
MAX_PROMPTS_PER_CALL: Final = 10_000
"""SubmitPrompts."""
MAX_PUTS_PER_CALL: Final = 1_000
"""PutGroups."""
MAX_PUT_SAMPLES_PER_CALL: Final = 1_024
"""Samples of all groups of a PutGroups, or of all leases of a ReleaseLeases."""
MAX_SAMPLES_PER_FETCH: Final = 65_536
"""FetchSamples."""
MAX_RETRIES_PER_CALL: Final = 4_096
"""RetryGroups."""
MAX_DROPS_PER_CALL: Final = 1_024
"""DropGroups."""
MAX_PAGE_SIZE: Final = 1_000
"""ListGroups; larger ones are cut to it."""
MAX_STATES: Final = 16
"""States to choose from in ListGroups."""

# One call of the rollout service

MAX_PROMPT_TOKENS: Final = 1 << 20
"""Token ids of a prompt."""
MAX_NEW_TOKENS: Final = 1 << 20
"""max_new_tokens."""
MAX_STOPS: Final = 1_024
"""Stop strings, and stop token ids."""
MAX_TEMPERATURE: Final = 1e6
"""temperature."""
MAX_SCHEMA_BYTES: Final = 32 << 10
"""json_schema of sampling parameters."""
MAX_SCHEMA_DEPTH: Final = 32
"""Objects and arrays inside of each other in a json_schema."""
MAX_REGEX_BYTES: Final = 4 << 10
"""regex of sampling parameters."""
MAX_RESPONSES: Final = 128
"""`n` of Generate."""
MAX_EVAL_DATASETS: Final = 256
"""Evaluate."""
MAX_EVAL_FILE_BYTES: Final = 256 << 20
"""A prompt file to evaluate on."""
MAX_EVAL_PROMPTS: Final = 1 << 20
"""Prompts of a data set to evaluate on."""
MAX_EVAL_SAMPLES: Final = 1 << 20
"""Samples of an evaluation."""
MAX_EVALUATIONS: Final = 8
"""Evaluations at the same time."""
MAX_TENSORS: Final = 100_000
"""Tensors of a manifest, and checksums of a commit."""
MAX_BUCKETS: Final = 1 << 16
"""Buckets of a publication."""
MAX_DELTAS: Final = 64
"""Folders under a delta."""
MAX_PUBLISH_GROUPS: Final = 1_024
"""Collective groups of a publication."""
MAX_PUBLISH_SECONDS: Final = 86_400.0
"""deadline_seconds of a publication."""
MAX_DRAIN_SECONDS: Final = 86_400.0
"""drain_seconds of ScaleFleet."""
MAX_ENGINES: Final = 65_536
"""engine_ids."""
MAX_PROBE_TOKENS: Final = 4_096
"""Tokens that engines are asked about at a commit."""
MAX_TASKS_PER_CALL: Final = 1_024
"""Tasks of a LeaseTasks; more are cut to it."""
MAX_TASK_WAIT_SECONDS: Final = 60.0
"""wait_seconds of LeaseTasks; longer waits are cut to it."""

# What is stored

MAX_PROMPT_BYTES: Final = 8 << 20
"""A prompt, metadata and tools included."""
MAX_PROMPT_LINE_BYTES: Final = 16 << 20
"""A line of a prompt file."""
MAX_TABLE_BYTES: Final = 1 << 30
"""A prompt file that is one JSON array, or CSV."""
MAX_MESSAGES: Final = 4_096
"""Chat messages of a prompt; and tool calls in all messages of one request."""
MAX_TOOLS: Final = 1_024
"""The tools that a request to the OpenAI endpoint offers."""
MAX_FILE_ROWS: Final = 20_000_000
"""Rows of a prompt file that is not streamed."""
MAX_ENVELOPE_BYTES: Final = 64 << 10
"""A sample's envelope."""
MAX_PAYLOAD_BYTES: Final = 64 << 20
"""A sample's payload; larger columns come out of line."""
MAX_GROUP_ENVELOPE_BYTES: Final = 16 << 20
"""The envelopes of a group, and those of all groups of a PutGroups."""
MAX_PARTIAL_BYTES: Final = 64 << 20
"""Envelopes and payloads of the partial samples of a group."""
MAX_TAGS: Final = 64
"""Tags of a sample, and named parts of its reward."""
MAX_TAG_CHARACTERS: Final = 2_048
"""The value of a tag."""
MAX_POLICY_RANGES: Final = 4_096
"""Policy ranges of a sample."""
MAX_COLUMNS: Final = 64
"""Columns of a sample, in its payload or out of line."""
MAX_COLUMN_RANK: Final = 8
"""Dimensions of a column."""
MAX_COLUMN_BYTES: Final = 1 << 40
"""A column; the product of its shape, too."""
MAX_UPLOAD_BYTES: Final = 8 << 20
"""The bytes in one UploadColumn."""
MAX_UPLOADS: Final = 1_000
"""Columns whose upload has begun and not ended."""

# Streams

MAX_STREAMS: Final = 256
"""Streams of a ledger."""
MAX_STREAM_NAMES: Final = 4_096
"""Names of streams that a ledger has ever had, those of deleted ones included."""
MAX_SAMPLES_PER_GROUP: Final = 1_024
"""n_samples_per_prompt, the samples of a group that fanned out, and its partial samples."""
MAX_SAMPLES_PER_STEP: Final = 65_536
"""groups_per_step x n_samples_per_prompt; a group may fan out to its even share of them."""
MAX_GROUPS_PER_STEP: Final = 2_048
"""groups_per_step and over_sampling_groups, of one shard."""
MAX_STALENESS: Final = 1_000_000
"""max_staleness and retain_steps."""
MAX_ATTEMPTS: Final = 1_000
"""max_attempts."""
MAX_GROUPS: Final = 1 << 31
"""max_groups, max_queued_groups and max_leases."""
MAX_SHARDS: Final = 1_024
"""num_shards."""
MAX_RUNS: Final = 16
"""Runs that share the engines of a rollout service."""
MAX_ROLLOUT_SERVICES: Final = 256
"""Rollout services on one ledger."""
MAX_FILES: Final = 64
"""Prompt files of a stream."""
MAX_FILE_WORKERS: Final = 64
"""num_workers of a prompt file."""
MAX_FILE_WEIGHT: Final = 1e6
"""The weight of a prompt file; the smallest is its inverse."""
MAX_STREAM_CONFIG_BYTES: Final = 64 << 10
"""A stream's config."""

# Scoring

MAX_SCORE_ITEMS_PER_CALL: Final = 4_096
"""Score."""
MAX_SCORE_ITEMS_PER_CALLER: Final = 8_192
"""Items of one connection that are being scored or wait for it."""
MAX_SCORE_ITEMS: Final = 16_384
"""Items of all callers that are being scored or wait for it."""
MAX_SCORER_SECONDS: Final = 30.0
"""One item in a scorer of headrace's own, unless reward_timeout_seconds is less; a custom function has that alone."""
MAX_MATH_CPU_SECONDS: Final = 2.0
"""Processor time of one item in scorers of mathematics and in reasoning_gym: an answer that takes longer is wrong."""
MAX_REGEX_SECONDS: Final = 5.0
"""One item in scorer regex: patterns come with the items, and some never come to an end."""
MAX_CODE_SECONDS: Final = 600.0
"""One item in scorer code, unless reward_timeout_seconds is less: a program may have many tests."""
MAX_REMOTE_SECONDS: Final = 600.0
"""One item in scorers remote_rm and judge, unless reward_timeout_seconds is less."""
MAX_HOOK_ANSWER_BYTES: Final = 256 << 20
"""What one call of a user's function returns."""


def to_json(value: Mapping[str, Any]) -> str:
    """Compact JSON with sorted keys; empty for an empty mapping, so equal content has equal bytes.

    Raises InvalidArgument for what JSON cannot hold, and for what `from_json` would refuse.
    """
    if not value:
        return ""
    try:
        text = canonical(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    _check_depth(text, value)
    return text


def canonical(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values have equal bytes. Raises as `json.dumps`, also for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """The mapping behind `to_json`. Raises InvalidArgument unless it is a JSON object that `to_json` can write."""
    if not text:
        return {}
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {text[:80]!r}: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"must be a JSON object, got {text[:80]!r}")
    _check_depth(text, value)
    if "\\u" in text:
        _check_encodable(value)
    return value


def object_of_line(line: str | bytes) -> dict[str, Any] | None:
    """Decodes a line of a file that grows: None for one that a kill tore or that is being written, or for no object."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_json(text: str) -> Any:
    """Parses like `json.loads`, but refuses NaN, Infinity, and numbers that a float holds as infinite."""
    return _DECODER.decode(text)


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number[:80]} is no JSON number, or too large for one")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse(text)
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _check_depth(text: str, value: Mapping[str, Any]) -> None:
    """It cannot be deeper than it has brackets, which are counted faster."""
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(value) > MAX_JSON_DEPTH:
        raise InvalidArgument(f"JSON is nested more than {MAX_JSON_DEPTH} deep: {text[:80]!r}")


def _check_encodable(value: Mapping[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"JSON holds half of a surrogate pair, which is no text: {error}") from error


_SHOWN_CHARACTERS = 80
_CONTROLS = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0))))


def shown(value: object) -> str:
    """A peer's value as an error message may have it: cut, control characters escaped."""
    text = repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def require_id(value: str, field: str) -> str:
    """The id: 1 to 512 characters, none of them a control character. `/` is allowed: ids of groups hold it."""
    return _printable(value, field, MAX_ID_CHARACTERS)


def require_name(value: str, field: str) -> str:
    """The name: 1 to 128 characters, none of them a control character."""
    return _printable(value, field, MAX_NAME_CHARACTERS)


def require_path(value: str, field: str) -> str:
    """The path: 1 to 4,096 characters, none of them a control character."""
    return _printable(value, field, MAX_PATH_CHARACTERS)


def optional_name(value: str, field: str) -> str | None:
    """The name; None where it is empty."""
    return require_name(value, field) if value else None


def cut_text(text: str) -> str:
    """A message for people, cut to 2,048 characters."""
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"


def encodable(text: str) -> str:
    """The text with backslash escapes for what UTF-8 cannot hold: paths and messages may contain lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str, most: int = 240) -> str:
    """A peer's message as a part of a line on a terminal: printable characters, blanks for all others, cut."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def require_some(count: int, field: str) -> None:
    """Raises InvalidArgument when there is none."""
    if count < 1:
        raise InvalidArgument(f"{field} is empty, must have at least one", field=field)


def require_at_most(count: int, most: int, field: str) -> None:
    """Raises InvalidArgument when a call brings more entries than it may."""
    if count > most:
        raise InvalidArgument(
            f"{field} has {count} entries, a call may have {most} at most: make several calls of it",
            field=field,
            reason="BATCH_TOO_LARGE",
            limit=str(most),
        )


def require_bytes(num_bytes: int, most: int, field: str) -> None:
    """Raises InvalidArgument for what is larger than it may be."""
    if num_bytes > most:
        raise InvalidArgument(
            f"{field} has {num_bytes} bytes, may have {most}", field=field, reason="TOO_LARGE", limit=str(most)
        )


def require_between(value: int, least: int, most: int, field: str) -> int:
    """The number. Raises InvalidArgument outside of [least, most]."""
    if not least <= value <= most:
        raise InvalidArgument(f"{field} is {value}, must be {least} to {most}", field=field)
    return value


def require_counter(value: int, field: str) -> int:
    """A step, an epoch, a policy version, a position, a number of bytes: 0 to 2^53."""
    return require_between(value, 0, MAX_COUNTER, field)


def require_finite(value: float, field: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """The number. Raises InvalidArgument for what is not finite, or outside of [least, most]."""
    if not (math.isfinite(value) and least <= value <= most):
        bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise InvalidArgument(f"{field} is {value:g}, must be {bounds}", field=field)
    return value


def require_json_object(text: str, field: str) -> dict[str, Any]:
    """The JSON object; {} where the text is empty."""
    value = _json(text, field) if text else {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} must be a JSON object, is {shown(text)}", field=field)
    return value


def require_json_array(text: str, field: str) -> list[Any]:
    """The JSON array; [] where the text is empty."""
    value = _json(text, field) if text else []
    if not isinstance(value, list):
        raise InvalidArgument(f"{field} must be a JSON array, is {shown(text)}", field=field)
    return value


def _printable(value: str, field: str, most: int) -> str:
    if not 0 < len(value) <= most:
        raise InvalidArgument(f"{field} has {len(value)} characters, must have 1 to {most}", field=field)
    if not value.isprintable() and not _CONTROLS.isdisjoint(value):
        raise InvalidArgument(f"{field} {shown(value)} holds a control character", field=field)
    return value


def _json(text: str, field: str) -> Any:
    require_bytes(len(text.encode("utf-8", "surrogatepass")), MAX_JSON_BYTES, field)
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is not JSON: {shown(text)}: {error}", field=field) from error
    if _depth(value) > MAX_JSON_DEPTH:
        raise InvalidArgument(f"{field} is nested deeper than {MAX_JSON_DEPTH} levels", field=field)
    if "\\u" in text:
        _check_encodable(value)
    return value


def _depth(value: Any) -> int:
    """Levels of objects and arrays, counted without recursion; stops behind the limit."""
    level, depth = [value], 0
    while depth <= MAX_JSON_DEPTH and (level := [each for each in level if isinstance(each, dict | list | tuple)]):
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def share_of_count(total: int, shard: int, num_shards: int) -> int:
    """The first shards have one more where it does not come out even."""
    return total // num_shards + (shard < total % num_shards)


def share_of_limit(total: int, num_shards: int) -> int:
    """The same for every shard, rounded up: together they may hold a little more than `total`."""
    return -(-total // num_shards)


def share_of_least(total: int, shard: int, num_shards: int) -> int:
    """A shard's share of what must be there before something happens: one at least, so that each waits for it."""
    return max(share_of_count(total, shard, num_shards), 1)


def whole_number(text: str, most: int) -> int | None:
    """Returns what ASCII digits mean, from 0 to `most`; None for any other text.

    `int` takes digits of other scripts, fails at some that `str.isdigit` calls digits, and at more than 4,300.
    """
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if number <= most else None


_CHARACTERS = 128
_NEAR = 0.8
"""A slip of the keys is nearer than this; two different names of a like length usually are not."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like it; None when none is as near as `cutoff`, which 1 would make equality."""
    return next(iter(difflib.get_close_matches(name[:_CHARACTERS], list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X?` for the nearest known name, or nothing when none is near."""
    near = nearest(name, known, cutoff=_NEAR)
    return f": did you mean {near}?" if near else ""


def syntax_tree(source: str | bytes) -> ast.Module:
    """Returns the module's tree. Raises as `ast.parse` does: SyntaxError, ValueError, RecursionError or MemoryError.

    CPython's count of the tree's depth is one per process: an object that the collector ends in the middle and that
    logs a traceback (which parses, too) leaves it wrong, and a good text then raises SystemError (gh-106905).
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
