"""The job as one of several rollout services reads it."""

from __future__ import annotations

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
