"""The samples and requests that a job may have at its engines at once, by kind."""

from __future__ import annotations

from headrace.job.schema.production import EvalSection, RolloutSection
from services.rollout.admission.engine_slots import EngineSlots
from services.rollout.admission.shares import Kind, Shares
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE

_SHARES_OF_AN_ENGINE = 4
"""The least number of parts of a step at an engine, where there are enough samples: one more or less matters less."""
_TRAINING_SHARE = 8
"""The number of samples that training has in flight for each sample of an evaluation and each request of a client."""


def groups_at_once(rollout: RolloutSection) -> int:
    """Returns the most groups that are worked on at once."""
    groups_per_step = rollout.over_sampling_batch_size or rollout.rollout_batch_size or 1
    return rollout.max_groups_in_flight or 2 * groups_per_step


def samples_of(rollout: RolloutSection, groups: int) -> int:
    """Returns the number of samples in `groups` groups."""
    return groups * (rollout.n_samples_per_prompt or 1)


def samples_at_once(rollout: RolloutSection) -> int:
    """Returns training's most samples in flight."""
    return samples_of(rollout, groups_at_once(rollout))


def samples_together(rollout: RolloutSection, num_engines: int) -> int:
    """Returns how many samples of a prompt go to one of all services' engines, whose prefix cache they share.

    All of them, and fewer where a step has too few prompts to keep every engine as busy as the others.
    """
    samples = samples_of(rollout, rollout.rollout_batch_size or 1)
    return max(1, min(rollout.n_samples_per_prompt or 1, samples // (_SHARES_OF_AN_ENGINE * num_engines)))


def evaluated_beside_training(rollout: RolloutSection, evaluation: EvalSection) -> int:
    """Evaluation's samples in flight beside training's, which does not go first where it waits for the evaluation."""
    if evaluation.eval_samples_in_flight is not None:
        return evaluation.eval_samples_in_flight
    if evaluation.eval_exact_version:
        return SAMPLES_AT_ONCE
    return max(1, samples_at_once(rollout) // _TRAINING_SHARE)


def requested_beside_training(rollout: RolloutSection) -> int:
    """Clients' requests in flight beside training's samples."""
    return rollout.client_requests_in_flight or max(1, samples_at_once(rollout) // _TRAINING_SHARE)


def engine_slots(rollout: RolloutSection, evaluation: EvalSection) -> EngineSlots:
    """Returns the slots of all kinds of requests."""
    slots = {
        Kind.TRAINING: samples_at_once(rollout),
        Kind.EVALUATION: evaluated_beside_training(rollout, evaluation),
        Kind.CLIENTS: requested_beside_training(rollout),
    }
    return EngineSlots(Shares(slots, alone=SAMPLES_AT_ONCE), max_waiting=rollout.max_waiting_requests)
