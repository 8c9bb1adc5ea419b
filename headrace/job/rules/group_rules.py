"""Rules of engine groups: what engines of one fleet must have in common, and what only GPUs can do."""

from __future__ import annotations

import importlib.util
import os

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.rules.engine_rules import check_argument
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.placement import EngineGroup

_FIELD = "engine_groups"
_COMMON = {
    **dict.fromkeys(
        ("dtype", "quantization", "load_format", "model_impl", "torchao_config"),
        "all engines are given the same weights, and a publication compares them",
    ),
    **dict.fromkeys(
        ("enable_priority_scheduling", "default_priority_value", "schedule_low_priority_values_first"),
        "requests have one priority, whichever engine the router gives them to",
    ),
}
_WORKERS = {
    "placeholder": "reserves GPUs without an engine, and with --colocate engines are on all of the trainer's: leave "
    "the group out, and lower rollout_num_gpus",
    **dict.fromkeys(
        ("prefill", "decode"),
        "divides a request over two engines on GPUs, which headrace does not do yet: make it a regular group",
    ),
}


def check_engine_groups(job: Job) -> None:
    """Raises ConfigError for groups that contradict each other, the job, or what engines can do."""
    groups, placement = job.placement.engine_groups, job.placement
    if not groups:
        return
    if placement.rollout_external_engine_addrs:
        raise ConfigError(
            "engine_groups with rollout_external_engine_addrs: engines that are started elsewhere have their arguments "
            "there; leave one of them out",
            field=_FIELD,
        )
    names = [group.name for group in groups]
    for group in groups:
        if names.count(group.name) > 1:
            raise ConfigError(f"two engine groups are called {group.name}: rename one", field=_FIELD)
        _check_group(group)
    gpus = sum(group.count * group.size for group in groups)
    if gpus != placement.rollout_num_gpus:
        parts = " + ".join(f"{group.name} {group.count * group.size}" for group in groups)
        raise ConfigError(
            f"rollout_num_gpus {placement.rollout_num_gpus} is not what the engine groups have, {parts} = {gpus}: "
            "leave it out, or change a group",
            field="rollout_num_gpus",
        )


def check_engine_placement(job: Job, scope: Scope) -> None:
    """Raises ConfigError for engines placed by Ray where there is no Ray, or that must be on this machine."""
    placement = job.placement
    if placement.rollout_placement != "ray":
        return
    if placement.rollout_external_engine_addrs:
        raise ConfigError(
            "rollout_placement ray with rollout_external_engine_addrs: those engines are started elsewhere; leave one "
            "of them out",
            field="rollout_placement",
        )
    if importlib.util.find_spec("ray") is None:
        scope.missing(
            ConfigError("rollout_placement ray needs the package ray: pip install 'headrace[ray]'", field="placement")
        )
    if "RAY_ADDRESS" not in os.environ:
        scope.missing(
            ConfigError(
                "rollout_placement ray starts engines in a cluster that runs: start one with `ray start`, and set "
                "RAY_ADDRESS",
                field="rollout_placement",
            )
        )


def check_group_sizes(job: Job, scope: Scope) -> None:
    """Raises ConfigError for engines of several tensor-parallel sizes where no GPUs are."""
    sizes = sorted({group.size for group in job.placement.engine_groups})
    if len(sizes) > 1 and not num_gpus():
        scope.missing(
            ConfigError(
                f"engine groups of {' and '.join(map(str, sizes))} GPUs per engine need GPUs, and this machine has "
                "none: give all groups the same num_gpus_per_engine",
                field=_FIELD,
            )
        )


def _check_group(group: EngineGroup) -> None:
    where = f"engine group {group.name}: "
    if group.worker_type in _WORKERS:
        raise ConfigError(f"{where}worker_type {group.worker_type} {_WORKERS[group.worker_type]}", field=_FIELD)
    for name, value in group.overrides.items():
        if name in _COMMON:
            raise ConfigError(
                f"{where}{name} cannot be of a group, because {_COMMON[name]}: pass --sglang-{name.replace('_', '-')}",
                field=_FIELD,
            )
        check_argument(name, value, where)
