"""Limits the sizes and counts of what producers send: prompts, envelopes and columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.prompts.label import LABEL_IS_JSON
from headrace.sample_checks import check_reward
from headrace.trajectory import Failure
from headrace.wire.checks import (
    cut_text,
    require_at_most,
    require_between,
    require_bytes,
    require_id,
    require_name,
    require_some,
    shown,
)
from headrace.wire.json_text import from_json
from headrace.wire.limits import (
    MAX_COLUMN_BYTES,
    MAX_COLUMNS,
    MAX_ENVELOPE_BYTES,
    MAX_GROUP_ENVELOPE_BYTES,
    MAX_ID_CHARACTERS,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PAYLOAD_BYTES,
    MAX_POLICY_RANGES,
    MAX_PROMPT_BYTES,
    MAX_SAMPLES_PER_GROUP,
    MAX_SAMPLES_PER_STEP,
    MAX_TAG_CHARACTERS,
    MAX_TAGS,
)

_DIGEST_BYTES = 32
_STRINGS = re.compile(rb'"(?:[^"\\\\]|\\\\.)*"', re.DOTALL)


def check_prompt(message: sample_pb2.Prompt, field: str) -> None:
    """A prompt with an id and a content, of a size that can be sent back."""
    require_id(message.prompt_id, f"{field}.prompt_id")
    require_bytes(message.ByteSize(), MAX_PROMPT_BYTES, field)
    content = message.WhichOneof("content")
    if content is None:
        raise InvalidArgument(f"prompt {message.prompt_id} has neither text nor messages", field=f"{field}.content")
    if content == "messages":
        require_some(len(message.messages.messages), f"{field}.messages")
        require_at_most(len(message.messages.messages), MAX_MESSAGES, f"{field}.messages")
        for turn in message.messages.messages:
            require_name(turn.role, f"{field}.messages.role")
            check_json(turn.extra_json, "{", f"{field}.messages.extra_json")
    check_json(message.metadata_json, "{", f"{field}.metadata_json")
    check_json(message.tools_json, "[", f"{field}.tools_json")
    check_json(message.hook_json, "{", f"{field}.hook_json")
    if others := sorted(from_json(message.hook_json).keys() - {LABEL_IS_JSON}):
        raise InvalidArgument(
            f"{field}.hook_json has {shown(others)}: only the job's own data source may set them, since they name code "
            f"to run. A client may set {LABEL_IS_JSON}",
            field=f"{field}.hook_json",
        )


def check_json(text: str, opening: str, field: str) -> None:
    """Raises InvalidArgument unless the text is empty or JSON that begins with `opening`. It decodes no values."""
    if not text:
        return
    data = text.encode()
    require_bytes(len(data), MAX_JSON_BYTES, field)
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{field} is not JSON: {shown(text)}: {error}", field=field) from error
    if not data.lstrip().startswith(opening.encode()):
        raise InvalidArgument(f"{field} must begin with {opening}, is {shown(text)}", field=field)
    if _depth(data) > MAX_JSON_DEPTH:
        raise InvalidArgument(f"{field} is nested deeper than {MAX_JSON_DEPTH} levels", field=field)


def _depth(data: bytes) -> int:
    """Counts how deeply objects and arrays are nested in JSON that parses."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return 0
    bare = np.frombuffer(_STRINGS.sub(b"", data), np.uint8)
    steps = np.isin(bare, (ord("["), ord("{"))).astype(np.int32) - np.isin(bare, (ord("]"), ord("}")))
    return int(steps.cumsum().max(initial=0))


def check_envelope(envelope: sample_pb2.SampleEnvelope, num_bytes: int, payload_bytes: int) -> None:
    """Checks the sizes of an envelope of `num_bytes` and of its payload, and the ids in the envelope."""
    require_bytes(num_bytes, MAX_ENVELOPE_BYTES, "samples.envelope")
    require_bytes(payload_bytes, MAX_PAYLOAD_BYTES, "samples.payload")
    require_id(envelope.sample_id, "samples.envelope.sample_id")
    if rollout_id := envelope.rollout_id:
        require_id(rollout_id, "samples.envelope.rollout_id")
    require_between(envelope.index, 0, MAX_SAMPLES_PER_STEP, "samples.envelope.index")
    _require_length(envelope.scorer, MAX_ID_CHARACTERS, "samples.envelope.scorer")
    _require_length(envelope.scorer_version, MAX_ID_CHARACTERS, "samples.envelope.scorer_version")
    if envelope.HasField("failure"):
        _require_length(envelope.failure.reason, MAX_NAME_CHARACTERS, "samples.envelope.failure.reason")
    require_at_most(len(envelope.policy_ranges), MAX_POLICY_RANGES, "samples.envelope.policy_ranges")
    if tags := envelope.tags:
        _check_map(tags, "samples.envelope.tags")
        for value in tags.values():
            _require_length(value, MAX_TAG_CHARACTERS, "samples.envelope.tags")
    if parts := envelope.reward_parts:
        _check_map(parts, "samples.envelope.reward_parts")
    if columns := envelope.out_of_line:
        _check_out_of_line(columns, "samples.envelope.out_of_line")


def check_group(envelope_bytes: Sequence[int], field: str) -> None:
    """Checks how many samples a group has and how large their envelopes are together."""
    require_at_most(len(envelope_bytes), MAX_SAMPLES_PER_GROUP, field)
    require_bytes(sum(envelope_bytes), MAX_GROUP_ENVELOPE_BYTES, f"{field}.envelope")


def failure_from_proto(message: sample_pb2.Failure, field: str) -> Failure:
    """Cuts the message, which is for people."""
    _require_length(message.reason, MAX_NAME_CHARACTERS, f"{field}.reason")
    return Failure(message.reason, cut_text(message.message))


def rewards_from_proto(rewards: Sequence[float], field: str) -> tuple[float, ...]:
    """Checks each reward of a group's samples like the reward of one sample."""
    require_at_most(len(rewards), MAX_SAMPLES_PER_GROUP, field)
    for reward in rewards:
        check_reward(field, reward)
    return tuple(rewards)


def require_sha256(digest: bytes, field: str) -> bytes:
    """Raises InvalidArgument unless the digest has 32 bytes."""
    if len(digest) != _DIGEST_BYTES:
        raise InvalidArgument(f"{field} has {len(digest)} bytes, must have {_DIGEST_BYTES}", field=field)
    return digest


def _check_out_of_line(columns: Sequence[sample_pb2.OutOfLineColumn], field: str) -> None:
    require_at_most(len(columns), MAX_COLUMNS, field)
    for column in columns:
        require_name(column.name, f"{field}.name")
        require_sha256(column.sha256, f"{field}.sha256")
        require_between(column.num_bytes, 0, MAX_COLUMN_BYTES, f"{field}.num_bytes")
    if len({column.name for column in columns}) < len(columns):
        raise InvalidArgument(f"a column comes twice in {field}", field=field)


def _check_map(entries: Mapping[str, Any], field: str) -> None:
    require_at_most(len(entries), MAX_TAGS, field)
    for key in entries:
        require_name(key, field)


def _require_length(text: str, most: int, field: str) -> None:
    if len(text) > most:
        raise InvalidArgument(f"{field} has {len(text)} characters, may have {most}", field=field)
