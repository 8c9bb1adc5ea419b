"""The command line of an SGLang server: defaults for the machine, the job's own arguments, and what headrace sets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, Unavailable
from headrace.job.engine_shape import EngineShape
from headrace.job.names import SGLANG
from headrace.limits import nearest
from headrace.process.child import run_once
from headrace.process.computing import gloo_at, openmp
from headrace.rpc.net import Address, free_port
from headrace.rpc.proxies import direct_to
from services.rollout.engine.weights import INITIAL_VERSION

MOST_ADAPTERS = 4
"""Versions of a run's adapter that an engine holds at once: the served one, the next one, and those still in use."""

_SECONDS = 120.0
_ASK = "import torch; print(torch.accelerator.is_available())"


@dataclass(frozen=True, slots=True)
class Machine:
    """`flags`: ServerArgs field → its command line option, and whether the option takes a value."""

    has_accelerator: bool
    flags: Mapping[str, tuple[str, bool]]


async def has_accelerator() -> bool:
    """Asks torch, in a short-lived process; a torch that was built for CPUs alone has none and is not asked.

    Raises Unavailable when torch cannot be imported.
    """
    try:
        if version("torch").endswith("+cpu") and not entry_points(group="torch.backends"):
            return False
    except PackageNotFoundError as error:
        raise _unusable(str(error)) from error
    try:
        asked = await run_once((sys.executable, "-c", _ASK), {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=_SECONDS)
    except TimeoutError as error:
        raise Unavailable(f"importing torch took longer than {_SECONDS:g} s") from error
    words = asked.out.decode().split()
    if asked.exit_code or not words:
        raise _unusable("\n".join(asked.last_lines))
    return words[-1] == "True"


def _unusable(why: str) -> Unavailable:
    return Unavailable(f"torch cannot be used here; install it and SGLang as requirements/README.md says:\n{why}")


# Measured on CPUs without AMX; without max_total_tokens the KV pool takes all memory and every step slows to seconds,
# without sleep_on_idle the scheduler burns a core while idle.
_CPU_RECIPE: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "load_snapshot_publish_interval": 1,  # decode steps: an engine that leaves is asked whether it has requests
}
_GPU_RECIPE: Mapping[str, Any] = {"skip_server_warmup": True, "enable_metrics": True}
# NumPy's threads begin with its import, and a process that has threads cannot be forked (`launch`).
_CPU_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_COMPILE_DISABLE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MOONCAKE_PROTOCOL": "tcp",  # by which a prefill engine sends what it computed to a decode engine
}
# /health would run a generation, which waits while weights are updated.
_ENVIRONMENT: Mapping[str, str] = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
# Before an engine ends in any way, SGLang would wait for 5 s and write dumps for its developers.
_DUMPS: Mapping[str, str] = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_DEFAULT_PRIORITY = 0  # SGLang would put requests that name none last


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Says what a job wants of each of its engines."""

    hf_checkpoint: Path
    shape: EngineShape
    seed: int
    """Engine k has this and k more."""
    sglang: Mapping[str, Any]
    """The job's own arguments, by the names that SGLang gives them."""
    threads: int
    """On a machine without an accelerator."""
    dtype: str = "float32"
    """Of the weights that are published, whatever config.json says: an engine could not take others."""
    returns_experts: bool = False
    """Each token comes with the experts that it was routed to."""
    mask_tokens: int | None = None
    """How many tokens of each sampling mask it returns at most; None: it returns no masks."""
    adapter_rank: int | None = None
    """The rank of the adapters that it is given beside its own weights; None: it is given weights."""
    adapted_layers: Sequence[str] = ()
    """The names of the layers that have one: q_proj and others."""
    num_runs: int = 1
    """How many runs each have adapters of theirs."""
    releases_memory: bool = False
    """It gives its memory to a trainer on the same GPUs, again and again."""
    first_engine: int = 0
    """The number of the first engine with these options."""
    host: str = "127.0.0.1"
    """The address at which it listens."""
    first_gpu: int = 0
    """The number of its first GPU; the others follow it."""


def check(sglang: Mapping[str, Any], machine: Machine) -> None:
    """Raises ConfigError for a name that SGLang does not know, or that headrace sets itself."""
    for name in sglang:
        if name in SGLANG["ours"]:
            raise ConfigError(
                f"--sglang-{_dashed(name)} cannot be given: {SGLANG['ours'][name]}", field=f"sglang.{name}"
            )
        if name not in machine.flags:
            near = nearest(name, machine.flags)
            hint = f": did you mean --sglang-{_dashed(near)}?" if near else ""
            raise ConfigError(f"--sglang-{_dashed(name)} is no argument of SGLang's{hint}", field=f"sglang.{name}")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Says which of an engine's machines a process is for, and the HOST:PORT of machine 0 where they meet."""

    rank: int
    meets_at: str


def words(
    options: EngineOptions, machine: Machine, *, engine: int, port: int, node: NodeOptions | None = None
) -> list[str]:
    """Returns the arguments of the server of engine number `engine` on 127.0.0.1:`port`.

    `node` is for an engine of several machines.
    """
    shape = options.shape
    arguments: dict[str, Any] = {
        **(_GPU_RECIPE if machine.has_accelerator else _CPU_RECIPE),
        "dtype": options.dtype,
        **options.sglang,
        "model_path": str(options.hf_checkpoint),
        "tp_size": shape.tp_size,
        "host": options.host,
        "port": port,
        "weight_version": str(INITIAL_VERSION),
        "random_seed": options.seed + engine,
    }
    if node is not None:
        arguments |= {"nnodes": shape.nodes, "node_rank": node.rank, "dist_init_addr": node.meets_at}
    if _schedules_by_priority(options.sglang):
        arguments.setdefault("default_priority_value", _DEFAULT_PRIORITY)
    if options.returns_experts:
        arguments["enable_return_routed_experts"] = True
    if options.mask_tokens is not None:
        arguments.setdefault("sampling_mask_max_tokens", options.mask_tokens)
    if options.adapter_rank is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": options.adapter_rank,
            "lora_target_modules": options.adapted_layers,
        }
        # One batch has requests of each run's versions in use, and of the engine's own weights.
        arguments.setdefault("max_loras_per_batch", MOST_ADAPTERS * options.num_runs + 1)
        if not machine.has_accelerator:
            arguments.setdefault("lora_backend", "torch_native")
    if options.sglang.get("disaggregation_mode") == "prefill":
        arguments["disaggregation_bootstrap_port"] = free_port(options.host)
    if machine.has_accelerator and options.releases_memory:
        arguments["enable_memory_saver"] = True
    if machine.has_accelerator:
        arguments["base_gpu_id"] = options.first_gpu + (engine - options.first_engine) * shape.devices
    return [word for name, value in arguments.items() for word in _words(*machine.flags[name], value)]


def evaluation_priority(sglang: Mapping[str, Any]) -> int | None:
    """Returns a priority after that of all other requests; None where engines do not schedule by priority."""
    if not _schedules_by_priority(sglang):
        return None
    of_others = int(sglang.get("default_priority_value", _DEFAULT_PRIORITY))
    return of_others + (1 if sglang.get("schedule_low_priority_values_first") else -1)


def _schedules_by_priority(sglang: Mapping[str, Any]) -> bool:
    return bool(sglang.get("enable_priority_scheduling"))


def environment(options: EngineOptions, *, has_accelerator: bool) -> dict[str, str]:
    """Returns the variables to add to an engine's environment. Those of SGLang's dumps are a person's to set."""
    ours = {
        **_ENVIRONMENT,
        **direct_to(options.host),
        **{name: value for name, value in _DUMPS.items() if name not in os.environ},
    }
    if has_accelerator:
        return ours
    return {**ours, **_CPU_ENVIRONMENT, **openmp(options.threads), **_cores(options.shape)}


def _cores(shape: EngineShape) -> dict[str, str]:
    """SGLang would give each rank a NUMA node, and refuse more ranks than there are: here each may use all cores."""
    if shape.devices == 1 or _CORES in os.environ:
        return {}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {_CORES: "|".join([cores] * shape.devices_per_node)}


def listening_for_weights(address: Address, named: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which gloo listens where a trainer elsewhere reaches it: at the service's own host."""
    return {} if address.is_loopback else gloo_at(address.host, named)


def _words(flag: str, takes_value: bool, value: Any) -> list[str]:
    if not takes_value:
        return [flag] if value else []
    if value is None:
        return []
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
