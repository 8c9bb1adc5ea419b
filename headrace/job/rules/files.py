"""Checks the files and folders that a job names, before anything starts. Each service checks more of its own part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import ConfigError
from headrace.installed import has_services, how_to_install
from headrace.job.eval_sets import eval_sets
from headrace.job.hook_files import HOOK_LEAVES, definitions, refuse_slimes
from headrace.job.option import options
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.run import passwords
from headrace.job.schema.section import PromptPath
from headrace.models.folders import NAMES_OF_WEIGHTS, damage_of, is_torn
from headrace.models.registry import read_architecture
from headrace.models.tokenizer.tokenizer import RemoteCode
from headrace.models.torch_dist import TRACKER, is_torch_dist, matched

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def check_files(job: Job, scope: Scope) -> None:
    """Raises ConfigError that names the option and the path."""
    _installed(job, scope)
    for service in scope.services:
        _python(job, service, scope)
    if "trainer" in scope.services or "rollout" in scope.services:
        _model("hf_checkpoint", job.model.hf_checkpoint, scope)
    for option, path in hooks_of(job):
        if service_of(option) in scope.services:
            _hook(option, path, scope)
    if "buffer" in scope.services:
        for text in job.data.prompt_data:
            _prompts("prompt_data", PromptPath.parse(text), scope)
    if "rollout" in scope.services:
        _of_evaluations(job, scope)
    if "reward" in scope.services:
        _of_reward(job, scope)
    if "trainer" in scope.services:
        _of_trainer(job, scope)


def _installed(job: Job, scope: Scope) -> None:
    own = [service for service in scope.services if getattr(job.services, f"{service}_python") is None]
    if own and not has_services():
        scope.missing(f"{', '.join(own)} cannot start here: {how_to_install(own)}")


def _python(job: Job, service: str, scope: Scope) -> None:
    option = f"{service}_python"
    try:
        words = job.services.python_of(service)
    except ValueError as error:  # shlex's
        raise ConfigError(f"{option}: {error}: close its quotes") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else "an empty text"
        scope.missing(f"{option}: {program} is no program here: name a Python interpreter")


def _of_evaluations(job: Job, scope: Scope) -> None:
    config = job.eval.eval_config
    if config is not None and not config.is_file():
        scope.missing(f"eval_config {config} does not exist", config)
        return
    for each in eval_sets(job.eval):
        _prompts(f"eval_prompt_data {each.name}", each.prompts, scope)
        if each.custom_generate_function_path is not None:
            _hook("custom_generate_function_path", each.custom_generate_function_path, scope)


def _of_reward(job: Job, scope: Scope) -> None:
    prompt = job.reward.judge_prompt
    if prompt is not None and not prompt.is_file():
        scope.missing(f"judge_prompt {prompt} is not a file: write one, or leave it out")
    folder = job.reward.reward_model_path
    if folder is not None and not folder.is_dir():
        scope.missing(
            f"reward_model_path {folder} is not a folder: name the folder that {job.reward.custom_rm_path} is "
            "constructed with"
        )


def _of_trainer(job: Job, scope: Scope) -> None:
    for name, folder in (
        ("ref_load", job.model.ref_load),
        ("critic_load", job.critic.critic_load),
        ("opd_teacher_load", job.distillation.opd_teacher_load),
    ):
        if folder is not None:
            _weights(name, folder, job, scope)
    _starting_weights(job, scope)
    folder = job.checkpoint.save_hf
    if folder is None or not folder.exists() or (folder.is_dir() and is_torn(folder)):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"save_hf {folder} exists and is not empty: name a new folder, or remove it")


def _prompts(option: str, part: PromptPath, scope: Scope) -> None:
    """What the file holds is for the check of the service that reads it."""
    if not part.path.is_file():
        scope.missing(f"{option} {part.path} does not exist", part.path)


def hooks_of(job: Job) -> Iterator[tuple[str, str]]:
    """Yields (option, path) of each user function that the job names; of agents those that are played here."""
    for option in HOOK_LEAVES:
        found = getattr(getattr(job, options()[option].section), option)
        if option != "agent_function_path" or not job.rollout.agent_hosts:
            yield from ((option, path) for path in (found if isinstance(found, tuple) else (found,)) if path)


def service_of(option: str) -> str:
    """The service that calls a user's function."""
    return {"hooks": "trainer", "reward": "reward", "buffer": "buffer", "data": "buffer"}.get(
        options()[option].section, "rollout"
    )


def _hook(option: str, hook: str, scope: Scope) -> None:
    """Looks into `file.py:fn`; the service that imports `pkg.mod.fn` checks it."""
    refuse_slimes(option, hook)
    file, _, function = hook.rpartition(":") if ".py:" in hook else (hook, "", "")
    if not file.endswith(".py"):
        return
    if not Path(file).is_file():
        scope.missing(f"{option} {hook}: {file} does not exist", Path(file))
        return
    if function not in (defined := [node.name for node in definitions(option, Path(file))]):
        there = f": it defines {', '.join(defined)}" if defined else ""
        raise ConfigError(f"{option} {hook}: {file} does not define {function}{there}")


def _starting_weights(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a folder to start or resume from that holds no checkpoint, or another model's."""
    load, initial = job.checkpoint.load, job.checkpoint.initial_megatron_checkpoint
    if load and load.exists() and not load.is_dir():
        raise ConfigError(f"load {load} is not a folder: name the folder of checkpoints")
    if load and is_torch_dist(load):
        if initial is not None:
            raise ConfigError(
                f"load {load} is Megatron's, so its weights are those to start with, and initial_megatron_checkpoint "
                f"{initial} names others: give only one"
            )
        _torch_dist("load", load, job)
    if initial and is_torch_dist(initial):
        _torch_dist("initial_megatron_checkpoint", initial, job)
    elif initial and not (initial / "manifest.json").is_file():
        scope.missing(
            f"initial_megatron_checkpoint {initial} has no manifest.json, and no {TRACKER}: "
            "name a step-… folder of a headrace run, or a torch_dist folder of Megatron"
        )


def _weights(option: str, folder: Path, job: Job, scope: Scope) -> None:
    """Raises ConfigError unless the folder holds a model's weights."""
    if is_torch_dist(folder):
        _torch_dist(option, folder, job)
    else:
        _model(option, folder, scope)


def _torch_dist(option: str, folder: Path, job: Job) -> None:
    """Raises ConfigError unless Megatron's checkpoint is whole and of this job's model. Reads no weights."""
    if not (job.model.hf_checkpoint / "config.json").is_file():
        return  # on another machine
    try:
        matched(folder, read_architecture(job.model.hf_checkpoint))
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.message}") from error


def _model(option: str, folder: Path, scope: Scope) -> None:
    """Raises ConfigError unless it is a Hugging Face folder with weights and a tokenizer."""
    if not folder.is_dir():
        scope.missing(f"{option} {folder} is not a folder: name a Hugging Face model folder")
        return
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(f"tokenizer ({' or '.join(_TOKENIZERS)})")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        scope.missing(f"{option} {folder} is not a complete model: it has no {', no '.join(missing)}")
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    closed = sorted(path.name for path in files if not os.access(path, os.R_OK))
    if closed:
        scope.missing(
            f"{option} {folder}: user {os.getuid()} cannot read {', '.join(closed)}: chmod a+r, or, of a link, "
            "bring what it leads to"
        )
    elif not missing and any((folder / name).is_file() for name in NAMES_OF_WEIGHTS) and (damage := damage_of(folder)):
        raise ConfigError(f"{option} {folder}: {damage}: copy or download it again")


def check_folders(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a folder that cannot be made or written, with the reason that the system gives."""
    checkpoint = job.checkpoint
    folders = {"run_dir": job.run.folder}
    if "trainer" in scope.services:
        folders |= {
            name: folder
            for name, folder in (
                ("save", checkpoint.save),
                ("save_hf", checkpoint.save_hf),
                ("export_root", checkpoint.export_root),
                ("update_weight_disk_path", job.publish.update_weight_disk_path),
            )
            if folder is not None
        }
    for name, folder in folders.items():
        try:
            _try(folder)
        except OSError as error:
            flag = f"--{name.replace('_', '-')}"
            scope.missing(f"{name} {folder} cannot be written: {error.strerror}: choose another folder with {flag}")


def _try(folder: Path) -> None:
    """Creates and removes a folder beside the first ancestor that is missing, to see whether the system allows it."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    os.rmdir(tempfile.mkdtemp(prefix=".headrace-", dir=there))


def check_passwords(job: Job) -> None:
    """Raises ConfigError for a URL with a password."""
    for name in passwords(job.model_dump(mode="json")):
        raise ConfigError(
            f"{name} holds a URL with a password, and a run's folder stores its job as plain text: remove the password "
            "and let the service read it from its environment or from another file"
        )


def check_remote_code(job: Job, scope: Scope) -> None:
    """Raises ConfigError where the tokenizer needs code that the job does not trust in each process that loads it."""
    if "rollout" not in scope.services:
        return
    code = RemoteCode.of(job.model.hf_checkpoint)
    code.require(trusted=job.model.trust_remote_code)
    if code.is_needed and _starts_engines(job) and not _engines_trust(job):
        raise ConfigError(
            f"{code.folder}: engines load the tokenizer too, which is code of the folder "
            f"({', '.join(code.tokenizer)}): pass --sglang-trust-remote-code as well"
        )


def where_code_runs(job: Job) -> str | None:
    """A sentence with the files and the processes; None for a folder without code."""
    code = RemoteCode.of(job.model.hf_checkpoint)
    files = list(dict.fromkeys((*code.tokenizer, *code.config)))
    if not files:
        return None
    named = f"{', '.join(files)} of {code.folder}"
    processes = [
        *(["the rollout service, hooks that use headrace.hooks.kit"] if job.model.trust_remote_code else []),
        *(["the engines"] if _starts_engines(job) and _engines_trust(job) else []),
    ]
    if not processes:
        return f"none: {named} are not run"
    return f"{named} may run in {' and in '.join(processes)}; in no buffer, reward service or trainer rank"


def _engines_trust(job: Job) -> bool:
    return bool(job.sglang.get("trust_remote_code") or job.sglang.get("skip_tokenizer_init"))


def _starts_engines(job: Job) -> bool:
    return not job.placement.rollout_external_engine_addrs and job.train.loss_mask_type is None
