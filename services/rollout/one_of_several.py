"""The share that one of several rollout services has of the job: engines, port, and how much is generated at once."""

from __future__ import annotations

import math

from headrace.job.schema.job import Job


def job_of_service(job: Job, number: int | None) -> Job:
    """With its share of the engines that are started elsewhere, and a port of its own for agents' requests.

    None: it is the only one.
    """
    if number is None:
        return job
    addresses, port = job.placement.rollout_external_engine_addrs, job.rollout.openai_port
    each = len(addresses) // job.services.num_rollout_services
    share = addresses[number * each : (number + 1) * each]
    return job.model_copy(
        update={
            "placement": job.placement.model_copy(update={"rollout_external_engine_addrs": share}),
            "rollout": job.rollout.model_copy(update={"openai_port": None if port is None else port + number}),
        }
    )


def groups_at_once(job: Job) -> int:
    """Several services share a step where they are on-policy, so that all have work from its beginning; else two."""
    groups_per_step = job.rollout.over_sampling_batch_size or job.rollout.rollout_batch_size or 1
    num_services = job.services.num_rollout_services
    groups = groups_per_step if num_services > 1 and not job.buffer.max_staleness else 2 * groups_per_step
    return job.rollout.max_groups_in_flight or math.ceil(groups / num_services)


def samples_at_once(job: Job) -> int:
    """Samples of those groups."""
    return groups_at_once(job) * (job.rollout.n_samples_per_prompt or 1)
