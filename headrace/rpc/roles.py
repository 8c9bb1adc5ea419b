"""The roles of callers, and the RPCs that each may call: docs/security.md shows them, a test calls each cell."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from headrace.errors import ConfigError


class Role(StrEnum):
    """A caller has one, or two of which each must allow a call.

    `SERVICE` is a run's own services, which the services' certificate shows.
    """

    VIEWER = "viewer"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    TRAINER = "trainer"
    ADMIN = "admin"
    SERVICE = "service"


OF_CLIENTS = tuple(role for role in Role if role is not Role.SERVICE)
"""The roles that a client's certificate may have."""


def role_named(text: str) -> Role:
    """Raises ConfigError for one that there is not."""
    try:
        return Role(text)
    except ValueError:
        raise ConfigError(f"role {text[:80]!r} is none: use one of {', '.join(Role)}") from None


_PRODUCER, _CONSUMER, _TRAINER, _SERVICE = Role.PRODUCER, Role.CONSUMER, Role.TRAINER, Role.SERVICE

_LOOKS = frozenset(Role)
"""State and progress, without what samples contain."""
_READS_SAMPLES = frozenset({_CONSUMER, _TRAINER, _SERVICE, Role.ADMIN})
_ASKS = frozenset({_CONSUMER, _PRODUCER, _TRAINER, _SERVICE, Role.ADMIN})
"""Costs an engine's or a worker's time, and changes nothing."""
_PRODUCES = frozenset({_PRODUCER, _SERVICE, Role.ADMIN})
_TRAINS = frozenset({_TRAINER, _SERVICE, Role.ADMIN})
_OPERATES = frozenset({Role.ADMIN})

ALLOWED: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "headrace.api.buffer.v1.BufferService": {
        "CreateStream": _TRAINS,
        "DeleteStream": _OPERATES,
        "ListStreams": _LOOKS,
        "SubmitPrompts": _PRODUCES,
        "LeaseGroups": _PRODUCES,
        "RenewLeases": _PRODUCES,
        "ReleaseLeases": _PRODUCES,
        "RetryGroups": _OPERATES,
        "DropGroups": _OPERATES,
        "PutGroups": _PRODUCES,
        "LeaseBatch": _TRAINS,
        "FetchSamples": _READS_SAMPLES,
        "ConsumeBatch": _TRAINS,
        "CommitStep": _TRAINS,
        "Rewind": _TRAINS,
        "SetPolicyVersion": _TRAINS,
        "Watch": _LOOKS,
        "ListGroups": _LOOKS,
        "GetStats": _LOOKS,
        "UploadColumn": _PRODUCES,
        "FetchColumn": _READS_SAMPLES,
        "Backup": _OPERATES,
    },
    "headrace.api.rollout.v1.RolloutService": {
        "Generate": _ASKS,
        "Evaluate": _TRAINS,
        "GetFleet": _LOOKS,
        "ScaleFleet": _OPERATES,
        "BeginPublish": _TRAINS,
        "PublishBucket": _TRAINS,
        "CommitPublish": _TRAINS,
        "AbortPublish": _TRAINS,
        "PauseProduction": _TRAINS,
        "ResumeProduction": _TRAINS,
        "ReleaseMemory": _TRAINS,
        "ResumeMemory": _TRAINS,
        "SetReward": _OPERATES,
        "LeaseTasks": _PRODUCES,
        "RenewTasks": _PRODUCES,
        "FinishTask": _PRODUCES,
    },
    "headrace.api.reward.v1.RewardService": {
        "Score": _ASKS,
        "ListScorers": _LOOKS,
        "ChangeScorer": _OPERATES,
        "GetScorerState": _LOOKS,
    },
    "headrace.api.trainer.v1.TrainerService": {
        "GetStatus": _LOOKS,
        "WatchProgress": _LOOKS,
        "Pause": _OPERATES,
        "Resume": _OPERATES,
        "SaveCheckpoint": _OPERATES,
        "ExportModel": _OPERATES,
        "Stop": _OPERATES,
    },
}
"""The allowed roles by service and method. No role may call a method that is not listed."""


def roles_of(service: str, method: str) -> frozenset[Role]:
    return ALLOWED.get(service, {}).get(method, frozenset())
