"""Derives the rest of a job: absolute paths, hooks' functions, parallel sizes and the batch arithmetic."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.engine_shape import engine_shapes
from headrace.job.hook_files import HOOK_LEAVES, completed
from headrace.job.load import flags
from headrace.job.schema.job import Job, derive
from headrace.job.schema.placement import EngineGroup
from headrace.job.schema.run import STEP_FILES
from headrace.job.schema.section import PromptPath
from headrace.job.table_file import TableFile
from headrace.limits import shown
from headrace.models.registry import find
from headrace.process.scratch import SHARED_MEMORY

_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")


def with_engine_groups(job: Job) -> Job:
    """Completes every group, and rollout_num_gpus where the job does not say it. Raises ConfigError."""
    placement = job.placement
    if placement.sglang_config is not None:
        if placement.engine_groups:
            raise ConfigError("sglang_config and engine_groups both say what engines there are: leave one out")
        placement = placement.model_copy(update={"engine_groups": _read(placement.sglang_config, job)})
    if not placement.engine_groups:
        return job
    each = placement.rollout_num_gpus_per_engine
    groups = tuple(_complete(group, number, each) for number, group in enumerate(placement.engine_groups, 1))
    update: dict[str, Any] = {"engine_groups": groups, "sglang_config": None}
    if "rollout_num_gpus" not in placement.model_fields_set:
        update["rollout_num_gpus"] = sum(group.count * group.size for group in groups)
    return job.model_copy(update={"placement": placement.model_copy(update=update)})


def _complete(group: EngineGroup, number: int, gpus_per_engine: int) -> EngineGroup:
    name = group.name or f"group-{number}"
    for argument in group.overrides:
        flags.require_known(argument, f"engine group {name}: overrides")
    size = group.num_gpus_per_engine or gpus_per_engine
    gpus = group.num_gpus if group.num_gpus is not None else (group.num_engines or 0) * size
    if not gpus:
        raise ConfigError(f"engine group {name}: say how large it is, by num_engines or num_gpus")
    if gpus % size:
        raise ConfigError(f"engine group {name}: num_gpus {gpus} cannot be divided by num_gpus_per_engine {size}")
    if group.num_engines not in (None, gpus // size):
        raise ConfigError(
            f"engine group {name}: num_engines {group.num_engines} x num_gpus_per_engine {size} is not num_gpus "
            f"{gpus}: leave one of them out"
        )
    found = {"name": name, "num_gpus": gpus, "num_gpus_per_engine": size, "num_engines": gpus // size}
    return group.model_copy(update=found)


def _read(path: Path, job: Job) -> tuple[EngineGroup, ...]:
    """Reads slime's YAML: a list of models, each with server_groups. Here there is one model, the policy."""
    file = TableFile("sglang_config", path)
    tree = _parsed(file)
    models = tree.get("sglang") if isinstance(tree, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        file.refuse("there must be a list of models under the key sglang")
    names = [shown(model.get("name")) for model in models]
    if len(models) > 1:
        file.refuse(
            f"it has {len(models)} models, {', '.join(names)}: engines serve the policy that is trained and no other; "
            "score with --custom-rm-path or a reward service of your own, and leave the other models out"
        )
    model = models[0]
    file.require_keys(f"model {names[0]}: ", model, _MODEL_KEYS)
    if model.get("update_weights") is False:
        file.refuse(f"model {names[0]}: update_weights is false, and engines serve the policy that is trained")
    own = model.get("model_path")
    if own is not None and Path(str(own)).expanduser().absolute() != job.model.hf_checkpoint.expanduser().absolute():
        file.refuse(f"model {names[0]}: model_path {shown(own)} is not hf_checkpoint {job.model.hf_checkpoint}")
    groups = model.get("server_groups", model.get("engine_groups"))
    if not isinstance(groups, list) or not groups:
        file.refuse(f"model {names[0]}: server_groups must be a list of one group or more")
    size = {"num_gpus_per_engine": model["num_gpus_per_engine"]} if "num_gpus_per_engine" in model else {}
    named = [(f"server group {number}", group) for number, group in enumerate(groups, 1)]
    return tuple(
        file.validated(EngineGroup, where, {**size, **file.require_table(where, group)}) for where, group in named
    )


def _parsed(file: TableFile) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "sglang_config is YAML, and PyYAML is not installed: `pip install pyyaml`, or write the groups as "
            "[[placement.engine_groups]] in the job file"
        ) from error
    try:
        return yaml.safe_load(file.read())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        file.refuse(f"it is not YAML: {error}")


def resolve(job: Job) -> Job:
    """Completes what the job options open. Raises ConfigError.

    Paths are taken from the working directory, a hook's file is completed by its only function, parallel sizes come
    from the preset, and one of the four batch sizes is derived.
    """
    job = _with_transport(_colocated(with_engine_groups(_engine_ranks(_for_tinker(job)))))
    sections = {name: value for name, value in job if isinstance(value, BaseModel)}
    absolute = job.model_copy(update={name: _absolute(section) for name, section in sections.items()})
    return derive(_generation_alone(_layout(_hooks(absolute))))


_TINKER_RANK = 32
"""The largest of a model, where the job says none: what Tinker's clients ask for."""


def _for_tinker(job: Job) -> Job:
    """Tinker's models are adapters, nothing is generated for steps of the run's own, and clients outlive a trainer."""
    if not job.serves_tinker:
        return job
    lora, publish = job.lora, job.publish
    if lora.lora_rank is None:
        lora = lora.model_copy(update={"lora_rank": _TINKER_RANK})
    if publish.update_weight_transport == "auto":
        publish = publish.model_copy(update={"update_weight_transport": "adapter"})
    sizes = {name: getattr(job.rollout, name) or 1 for name in ("rollout_batch_size", "n_samples_per_prompt")}
    return job.model_copy(
        update={
            "lora": lora,
            "publish": publish,
            "rollout": job.rollout.model_copy(update=sizes),
            "placement": job.placement.model_copy(update={"use_fault_tolerance": True}),
        }
    )


def _engine_ranks(job: Job) -> Job:
    """Moves --sglang-tp-size to rollout_num_gpus_per_engine, of which it is one stage."""
    if "tp_size" not in job.sglang:
        return job
    tensor, each = job.sglang["tp_size"], job.placement.rollout_num_gpus_per_engine
    if not isinstance(tensor, int) or isinstance(tensor, bool) or tensor < 1:
        raise ConfigError(f"--sglang-tp-size {tensor}: should be a number of 1 or more")
    stages = job.sglang.get("pp_size", 1)
    size = tensor * stages if isinstance(stages, int) else tensor  # a rule refuses other stages
    if "rollout_num_gpus_per_engine" in job.placement.model_fields_set and size != each:
        raise ConfigError(
            f"--sglang-tp-size {tensor} contradicts rollout_num_gpus_per_engine {each}, which is the same setting"
            + (f" times --sglang-pp-size {stages}" if stages != 1 else "")
            + ": leave one out"
        )
    placement = job.placement.model_copy(update={"rollout_num_gpus_per_engine": size})
    arguments = {name: value for name, value in job.sglang.items() if name != "tp_size"}
    return job.model_copy(update={"placement": placement, "sglang": arguments})


def _hooks(job: Job) -> Job:
    """Completes `f.py` by the only function in it that fits."""
    update = {}
    for section in ("rollout", "reward", "hooks", "buffer", "data"):
        values = getattr(job, section)
        paths = {name: value for name, value in values if name in HOOK_LEAVES and value is not None}
        whole = {name: _completed(name, path, job) for name, path in paths.items()}
        update[section] = values.model_copy(update=whole)
    return job.model_copy(update=update)


def _completed(option: str, value: str | tuple[str, ...], job: Job) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return completed(option, value, group_rm=job.reward.group_rm)
    return tuple(completed(option, path, group_rm=job.reward.group_rm) for path in value)


def _layout(job: Job) -> Job:
    """Adds a preset's parallel sizes where the job gives none."""
    if job.model.model is None:
        return job
    return job.model_copy(update={"megatron": {**find(job.model.model).layout, **job.megatron}})


def _colocated(job: Job) -> Job:
    """A machine's engines have as many GPUs as its ranks; both give up their memory.

    Weights come through the machine's shared memory, or of several machines through a folder. Where only trainer or
    engines are there, they have the GPUs to themselves.
    """
    placement, publish = job.placement, job.publish
    if not placement.colocate:
        return job
    are_two = job.asks_engines and not (job.debug.debug_rollout_only or job.debug.trains_alone)
    update: dict[str, Any] = {
        name: are_two and value is not False
        for name, value in (("offload_train", placement.offload_train), ("offload_rollout", placement.offload_rollout))
    }
    if "rollout_num_gpus" not in placement.model_fields_set:
        update["rollout_num_gpus"] = placement.actor_num_gpus_per_node
    if publish.update_weight_transport == "auto":
        transport = "ipc" if placement.actor_num_nodes == 1 else "disk"
        publish = publish.model_copy(update={"update_weight_transport": transport})
    return job.model_copy(update={"placement": placement.model_copy(update=update), "publish": publish})


def _with_transport(job: Job) -> Job:
    """Decides what update_weight_transport auto is, by what the job says and by what stays the same on a machine."""
    publish, placement = job.publish, job.placement
    if publish.update_weight_transport != "auto":
        return job
    starts_all_here = (
        job.services.rollout_address is None
        and placement.rollout_placement == "local"
        and placement.actor_num_nodes == 1
        and not placement.rollout_external_engine_addrs
    )
    has_draft = bool(job.sglang.get("speculative_draft_model_path"))  # files would be loaded into it, too
    needs_other = publish.update_weight_delta or publish.update_weight_rollback == "host" or has_draft
    # From GPU to GPU a broadcast is direct, and files in memory would go through the host.
    if starts_all_here and not num_gpus() and not needs_other and _memory_holds(job.model.hf_checkpoint):
        transport = "ipc"
    else:
        transport = "disk" if any(shape.pp_size > 1 for shape in engine_shapes(job)) else "collective"
    return job.model_copy(update={"publish": publish.model_copy(update={"update_weight_transport": transport})})


def _memory_holds(hf_checkpoint: Path) -> bool:
    """Two versions fit, and again as much; each may have twice the bytes of the checkpoint's files."""
    num_bytes = sum(file.stat().st_size for file in hf_checkpoint.glob("*.safetensors") if file.is_file())
    return 0 < 8 * num_bytes <= (shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0)


def _generation_alone(job: Job) -> Job:
    """Nothing publishes new weights: every step is generated by the first version, and none of them is too old."""
    if not job.debug.debug_rollout_only:
        return job
    staleness = max(job.buffer.max_staleness, job.rollout.num_rollout)
    return job.model_copy(update={"buffer": job.buffer.model_copy(update={"max_staleness": staleness})})


def _absolute(section: BaseModel) -> BaseModel:
    return section.model_copy(update={name: _made_absolute(name, value) for name, value in section})


def _made_absolute(name: str, value: Any) -> Any:
    if name == "reward_parts":
        return tuple(part.model_copy(update={"scorer": _absolute_hook(part.scorer)}) for part in value)
    if isinstance(value, Path):
        return value.expanduser().absolute()
    if name == "prompt_data":
        return tuple(PromptPath.parse(text).absolute() for text in value)
    if name == "eval_prompt_data":
        return tuple((dataset, path.expanduser().absolute()) for dataset, path in value)
    if name in STEP_FILES and value is not None:
        return str(Path(value).expanduser().absolute())
    if name in HOOK_LEAVES and isinstance(value, str):
        return _absolute_hook(value)
    if name in HOOK_LEAVES and isinstance(value, list | tuple):
        return tuple(_absolute_hook(path) if isinstance(path, str) else path for path in value)
    return value


def _absolute_hook(path: str) -> str:
    file, colon, function = path.rpartition(":") if ".py:" in path else (path, "", "")
    if not file.endswith(".py"):
        return path
    return f"{Path(file).expanduser().absolute()}{colon}{function}"
