"""Items to score and their results: a score, or an error that is never read as a reward of 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.errors import Internal, InvalidArgument
from headrace.sample_checks import check_reward
from headrace.wire.json_text import from_json, to_json


@dataclass(frozen=True, slots=True)
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
        )

    @classmethod
    def unpack(cls, packed: pb.ScoreItem) -> ScoreItem:
        """Raises InvalidArgument when the metadata is no JSON object."""
        return cls(
            item_id=packed.item_id,
            prompt=packed.prompt,
            response=packed.response,
            label=packed.label if packed.HasField("label") else None,
            metadata=from_json(packed.metadata_json),
            group_id=packed.group_id,
            status=packed.status,
            response_tokens=packed.response_tokens,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward, its parts, and the scorer that gave it."""

    value: float
    scorer: str
    scorer_version: str
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreError:
    """The reason for a missing reward. With `retryable` another try may help."""

    reason: str
    message: str
    retryable: bool = False


ScoreResult = Score | ScoreError


def pack_result(item_id: str, result: ScoreResult) -> pb.ScoreResult:
    match result:
        case Score(value, scorer, version, parts):
            score = pb.Score(value=value, scorer=scorer, scorer_version=version, parts=parts)
            return pb.ScoreResult(item_id=item_id, score=score)
        case ScoreError(reason, message, retryable):
            error = pb.ScoreError(reason=reason, message=message, retryable=retryable)
            return pb.ScoreResult(item_id=item_id, error=error)


def unpack_result(packed: pb.ScoreResult) -> ScoreResult:
    """A score that no sample may have becomes an error. Raises Internal when the service sent neither."""
    if packed.HasField("score"):
        return _checked(packed.score)
    if packed.HasField("error"):
        return ScoreError(packed.error.reason, packed.error.message, packed.error.retryable)
    raise Internal(f"the reward service returned neither a score nor an error for item {packed.item_id}")


def _checked(score: pb.Score) -> ScoreResult:
    try:
        check_reward("the score", score.value)
        for name, value in score.parts.items():
            check_reward(f"the score's part {name!r}", value)
    except InvalidArgument as error:
        return ScoreError("SCORE_INVALID", f"{error.message} (scorer {score.scorer})")
    return Score(score.value, score.scorer, score.scorer_version, dict(score.parts))
