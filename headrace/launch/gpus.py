"""Tells the trainer's ranks and the engines which GPUs are theirs, by the variables that CUDA reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.devices.inventory import ORDER
from headrace.devices.plan import DeviceShare
from headrace.job.rules.gpus import device_plan
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job

RANK_DEVICES = "HEADRACE_RANK_DEVICES"
"""The ranks' CUDA_VISIBLE_DEVICES on each machine, where Slurm or Ray would set another."""


def gpu_environments(job: Job, services: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The variables of each service that gets GPUs here. Empty on a machine without.

    What a person exports (`given`) for one service that is started by itself is that service's as it is.
    """
    alone = not {"trainer", "rollout"} <= set(services)
    if alone and "CUDA_VISIBLE_DEVICES" in given:
        return {}
    plan = device_plan(job, Scope(services))
    if plan is None:
        return {}
    found = {}
    if plan.trainer:
        found["trainer"] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(plan.trainer)}
        if not alone:
            found["trainer"][RANK_DEVICES] = _all(plan.trainer)
    if plan.engines:
        found["rollout"] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(plan.engines)}
    return found


def rank_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a rank that Slurm or Ray has started."""
    devices = environment.get(RANK_DEVICES)
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}


def _all(shares: Sequence[DeviceShare]) -> str:
    return ",".join(share.visible for share in shares)
