"""The share that one of several rollout services has of the job: engines, port, and how much is generated at once."""

from __future__ import annotations

import math

from headrace.job.schema.job import Job


def job_of_service(job: Job, number: int | None) -> Job:
    """Returns the job with this service's share of external engines and of groups, and a port of its own for agents.

    None: it is the only one.
    """
    if number is None:
        return job
    addresses, port = job.placement.rollout_external_engine_addrs, job.rollout.openai_port
    each = len(addresses) // job.services.num_rollout_services
    share = addresses[number * each : (number + 1) * each]
    rollout = {
        "openai_port": None if port is None else port + number,
        "max_groups_in_flight": job.rollout.max_groups_in_flight or _groups_at_once(job),
    }
    return job.model_copy(
        update={
            "placement": job.placement.model_copy(update={"rollout_external_engine_addrs": share}),
            "rollout": job.rollout.model_copy(update=rollout),
        }
    )


def _groups_at_once(job: Job) -> int:
    """Services share a step where they are on-policy, so that all have work from its beginning; else two steps."""
    groups_per_step = job.rollout.over_sampling_batch_size or job.rollout.rollout_batch_size or 1
    groups = 2 * groups_per_step if job.buffer.max_staleness else groups_per_step
    return math.ceil(groups / job.services.num_rollout_services)
