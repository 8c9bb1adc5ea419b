"""Derives a job's engine groups: from its own tables, or from the file of slime's --sglang-config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from headrace.errors import ConfigError
from headrace.job.load import sglang
from headrace.job.schema.job import Job
from headrace.job.schema.parts.engine_group import EngineGroup
from headrace.suggest import did_you_mean
from headrace.wire.checks import shown

_MAX_FILE_BYTES = 1 << 20
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_FIELD = "engine_groups"


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
        sglang.require_known(argument, f"engine group {name}: overrides")
    size = group.num_gpus_per_engine or gpus_per_engine
    gpus = group.num_gpus if group.num_gpus is not None else (group.num_engines or 0) * size
    if not gpus:
        raise ConfigError(f"engine group {name}: say how large it is, by num_engines or num_gpus", field=_FIELD)
    if gpus % size:
        raise ConfigError(
            f"engine group {name}: num_gpus {gpus} cannot be divided by num_gpus_per_engine {size}", field=_FIELD
        )
    if group.num_engines not in (None, gpus // size):
        raise ConfigError(
            f"engine group {name}: num_engines {group.num_engines} x num_gpus_per_engine {size} is not num_gpus "
            f"{gpus}: leave one of them out",
            field=_FIELD,
        )
    found = {"name": name, "num_gpus": gpus, "num_gpus_per_engine": size, "num_engines": gpus // size}
    return group.model_copy(update=found)


def _read(path: Path, job: Job) -> tuple[EngineGroup, ...]:
    """Reads slime's YAML: a list of models, each with server_groups. Here there is one model, the policy."""
    tree = _parsed(path)
    models = tree.get("sglang") if isinstance(tree, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        _refuse(path, "there must be a list of models under the key sglang")
    names = [shown(model.get("name")) for model in models]
    if len(models) > 1:
        _refuse(
            path,
            f"it has {len(models)} models, {', '.join(names)}: engines serve the policy that is trained and no other; "
            "score with --custom-rm-path or a reward service of your own, and leave the other models out",
        )
    model = models[0]
    _require_keys(path, f"model {names[0]}", model, _MODEL_KEYS)
    if model.get("update_weights") is False:
        _refuse(path, f"model {names[0]}: update_weights is false, and engines serve the policy that is trained")
    own = model.get("model_path")
    if own is not None and Path(str(own)).expanduser().absolute() != job.model.hf_checkpoint.expanduser().absolute():
        _refuse(path, f"model {names[0]}: model_path {shown(own)} is not hf_checkpoint {job.model.hf_checkpoint}")
    groups = model.get("server_groups", model.get("engine_groups"))
    if not isinstance(groups, list) or not groups:
        _refuse(path, f"model {names[0]}: server_groups must be a list of one group or more")
    size = {"num_gpus_per_engine": model["num_gpus_per_engine"]} if "num_gpus_per_engine" in model else {}
    return tuple(_group(path, number, size, group) for number, group in enumerate(groups, 1))


def _group(path: Path, number: int, of_model: Mapping[str, Any], table: Any) -> EngineGroup:
    where = f"server group {number}"
    if not isinstance(table, dict):
        _refuse(path, f"{where} is {shown(table)}: write it as a mapping")
    _require_keys(path, where, table, tuple(EngineGroup.model_fields))
    try:
        return EngineGroup.model_validate({**of_model, **table})
    except ValidationError as error:
        first = error.errors()[0]
        key, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        _refuse(path, f"{where}: {key}: {what}, got {shown(first['input'])}")


def _require_keys(path: Path, where: str, table: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            _refuse(path, f"{where}: {shown(key)} is unknown{did_you_mean(str(key), known)}")


def _parsed(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "sglang_config is YAML, and PyYAML is not installed: `pip install pyyaml`, or write the groups as "
            "[[placement.engine_groups]] in the job file",
            field="sglang_config",
        ) from error
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            _refuse(path, f"it has more than {_MAX_FILE_BYTES} bytes, so it is no list of engine groups")
        return yaml.safe_load(text)
    except OSError as error:
        _refuse(path, f"it cannot be read: {error.strerror}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        _refuse(path, f"it is not YAML: {error}")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigError(f"sglang_config {path}: {why}", field="sglang_config")
