"""Items to score and their results: a score, or an error that is never read as a reward of 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.errors import Internal, InvalidArgument
from headrace.limits import from_json, require_json_object, shown, to_json
from headrace.prompts import LABEL_IS_JSON
from headrace.trajectory import (
    LEFT_OUT,
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    TOKENS,
    TURNS,
    Sample,
    Status,
    check_reward,
    check_token_rows,
    pack_column,
    unpack_column,
)

SCORER_UNAVAILABLE = "SCORER_UNAVAILABLE"
"""The reason of a ScoreError whose scorer waits for a server: another try may help, and its sample can wait."""
SCORER_ABSTAINED = "SCORER_ABSTAINED"
CUSTOM_RM_PATH = "custom_rm_path"
_SCORED_FIELDS = (LABEL_IS_JSON, CUSTOM_RM_PATH, TURNS)
"""Of a sample's hook_fields: what a reward service reads."""
_STATUSES = ("", *(status.value for status in Status))
SCORED_COLUMNS = (TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS)


# Of items and scores a call makes hundreds, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class ScoreItem:
    """One response to score. `prompt` is text or a JSON array of messages; `status` is the sample's."""

    item_id: str
    prompt: str
    response: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""
    status: str = "completed"
    response_tokens: int = 0
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False)
    """What users' functions get: tokens int32 [T], loss_mask uint8 [R], rollout_log_probs float32 [R]; or nothing."""
    index: int | None = None
    """The sample's place in its group, for users' functions; None: its place in the call."""
    hook_fields: Mapping[str, Any] = field(default_factory=dict)
    """`label_is_json`; `custom_rm_path`: the function that scores the item instead of the service's own; `turns`: a
    conversation's messages."""

    @classmethod
    def of(cls, sample: Sample, *, has_columns: bool = True) -> ScoreItem:
        """What a reward service sees of a sample; `has_columns` False leaves its tokens and its conversation out."""
        columns = scored_columns(sample) if has_columns else {}
        hook_fields = {key: sample.hook_fields[key] for key in _SCORED_FIELDS if key in sample.hook_fields}
        if TURNS in hook_fields and not has_columns:
            hook_fields[TURNS] = list(LEFT_OUT)
        return cls(
            item_id=sample.sample_id,
            prompt=sample.prompt,
            response=sample.response,
            label=sample.label,
            metadata=sample.metadata,
            group_id=sample.group_id,
            status=sample.status.value,
            response_tokens=sample.response_length,
            columns=columns,
            index=sample.index,
            hook_fields=hook_fields,
        )

    def pack(self) -> pb.ScoreItem:
        return pb.ScoreItem(
            item_id=self.item_id,
            prompt=self.prompt,
            response=self.response,
            label=self.label,
            metadata_json=to_json(self.metadata),
            group_id=self.group_id,
            status=self.status,
            response_tokens=self.response_tokens,
            columns=[pack_column(name, array) for name, array in self.columns.items()],
            index=self.index,
            hook_json=to_json(self.hook_fields) if self.hook_fields else "",
        )

    @classmethod
    def unpack(cls, packed: pb.ScoreItem) -> ScoreItem:
        """Raises InvalidArgument for metadata that is no JSON object, and for what no sample could have."""
        if packed.status not in _STATUSES:
            raise InvalidArgument(f"status is {shown(packed.status)}, must be one of {', '.join(_STATUSES)}")
        return cls(
            item_id=packed.item_id,
            prompt=packed.prompt,
            response=packed.response,
            label=packed.label if packed.HasField("label") else None,
            metadata=require_json_object(packed.metadata_json, "metadata_json"),
            group_id=packed.group_id,
            status=packed.status,
            response_tokens=packed.response_tokens,
            columns=_columns(packed),
            index=packed.index if packed.HasField("index") else None,
            hook_fields=from_json(packed.hook_json),
        )


def scored_columns(sample: Sample) -> dict[str, NDArray[Any]]:
    return {TOKENS: sample.tokens, LOSS_MASK: sample.loss_mask, ROLLOUT_LOG_PROBS: sample.rollout_log_probs}


def _columns(packed: pb.ScoreItem) -> dict[str, NDArray[Any]]:
    if not packed.columns:
        return {}
    columns = {column.name: unpack_column(column) for column in packed.columns}
    if len(packed.columns) != len(SCORED_COLUMNS) or columns.keys() != set(SCORED_COLUMNS):
        named = [column.name[:80] for column in packed.columns][:8]
        raise InvalidArgument(f"columns are {named}, must be {', '.join(SCORED_COLUMNS)}, or none")
    check_token_rows("", *(columns[name] for name in SCORED_COLUMNS))
    if (length := len(columns[LOSS_MASK])) != packed.response_tokens:
        raise InvalidArgument(f"{LOSS_MASK} has {length} entries, response_tokens is {packed.response_tokens}")
    return columns


@dataclass(slots=True)
class Score:
    """A finite reward, its parts, and the scorer that gave it."""

    value: float
    scorer: str
    scorer_version: str
    parts: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    """The item's metadata as a user's function left it; None when it changed nothing."""


@dataclass(frozen=True, slots=True)
class ScoreError:
    """The reason for a missing reward. With `retryable` another try may help."""

    reason: str
    message: str
    retryable: bool = False


ScoreResult = Score | ScoreError


def pack_result(item_id: str, result: ScoreResult) -> pb.ScoreResult:
    if isinstance(result, ScoreError):
        error = pb.ScoreError(reason=result.reason, message=result.message, retryable=result.retryable)
        return pb.ScoreResult(item_id=item_id, error=error)
    # An empty map costs more than all the rest.
    score = pb.Score(
        value=result.value, scorer=result.scorer, scorer_version=result.scorer_version, parts=result.parts or None
    )
    if result.metadata is not None:
        score.metadata_json = to_json(result.metadata)
    return pb.ScoreResult(item_id=item_id, score=score)


def unpack_result(packed: pb.ScoreResult) -> ScoreResult:
    """A score that no sample may have becomes an error. Raises Internal when the service sent neither."""
    if packed.HasField("score"):
        return _checked(packed.score)
    if packed.HasField("error"):
        return ScoreError(packed.error.reason, packed.error.message, packed.error.retryable)
    raise Internal(f"the reward service returned neither a score nor an error for item {packed.item_id}")


def _checked(score: pb.Score) -> ScoreResult:
    parts = dict(score.parts)
    try:
        check_reward("the score", score.value)
        for name, value in parts.items():
            check_reward(f"the score's part {name!r}", value)
        metadata = (
            require_json_object(score.metadata_json, "metadata_json") if score.HasField("metadata_json") else None
        )
    except InvalidArgument as error:
        return ScoreError("SCORE_INVALID", f"{error.message} (scorer {score.scorer})")
    return Score(score.value, score.scorer, score.scorer_version, parts, metadata)
