"""Tells the trainer's ranks and the engines which GPUs are theirs, by the variables that CUDA reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.devices import ORDER, RANK_DEVICES, DeviceShare
from headrace.job.rules.machines.gpus import device_plan
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.specs import processes


def gpu_environments(job: Job, services: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The variables of each process that gets GPUs here. Empty on a machine without.

    What a person exports (`given`) for one service that is started by itself is for that service alone.
    """
    alone = not {"trainer", "rollout"} <= set(services)
    plan = device_plan(job, Scope(services), leaves_the_trainers="CUDA_VISIBLE_DEVICES" not in given or not alone)
    if plan is None:
        return {}
    found = {}
    if plan.trainer:
        found["trainer"] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(plan.trainer)}
        if not alone:
            found["trainer"][RANK_DEVICES] = _all(plan.trainer)
    each = len(plan.engines) // job.services.rollout_services
    for number, process in enumerate(processes(job, "rollout") if each else ()):
        share = plan.engines[number * each : (number + 1) * each]
        found[process] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(share)}
    return found


def _all(shares: Sequence[DeviceShare]) -> str:
    return ",".join(share.visible for share in shares)
