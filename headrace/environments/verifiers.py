"""Tasksets of the package `verifiers` (version 1, 0.4): their tasks as rows, and an agent that plays one row.

A row holds all of its task, so that a host that plays it reads no data set. Programs of the environment run as
processes of this machine (`subprocess`): verifiers' own choice is a cloud. One that would let the policy run code here
is refused; `runtime.type` docker or podman gives it a container.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.limits import did_you_mean

try:
    import verifiers.v1 as vf
    from verifiers.v1 import tasksets as tasksets_of_verifiers
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils.loaders import taskset_class
except ImportError as error:
    raise FailedPrecondition(
        f"{sys.executable} has no verifiers 0.4 ({error}): make an environment with `pip install -r "
        "requirements/verifiers.txt -e .` and name its Python with --python"
    ) from error

METADATA = "verifiers"
"""The key of a row's metadata: `{"config": …, "task": …}`, the environment's settings and the task's data."""
REWARD = "reward"
_SHOWN_CHARACTERS = 500
_NO_CODE = "null"
"""The harness that is a chat with the task's tools."""


@dataclass(frozen=True, slots=True)
class Found:
    """An installed taskset; `trouble` says why it cannot be loaded."""

    id: str
    package: str
    version: str
    trouble: str = ""


def tasksets() -> Sequence[Found]:
    """All tasksets that are installed: verifiers' own, and those of packages that require it."""
    own = [(module.name, "verifiers") for module in pkgutil.iter_modules(tasksets_of_verifiers.__path__)]
    others = [
        (module, each.name)
        for each in distributions()
        if any(_names_verifiers(text) for text in each.requires or ())
        for module in sorted({path.parts[0].removesuffix(".py") for path in each.files or () if _is_module(path.parts)})
    ]
    named = [*own, *((module, package) for module, package in others if package != "headrace")]
    return [each for module, package in sorted(named) if (each := _found(module, package)) is not None]


def _names_verifiers(requirement: str) -> bool:
    return requirement.split(";")[0].strip().startswith("verifiers") and "extra ==" not in requirement


def _is_module(parts: tuple[str, ...]) -> bool:
    return (len(parts) == 2 and parts[1] == "__init__.py") or (len(parts) == 1 and parts[0].endswith(".py"))


def _found(module: str, package: str) -> Found | None:
    try:
        taskset_class(module)
    except (TypeError, AttributeError):
        return None  # a package that uses verifiers and has no taskset
    except Exception as error:  # noqa: BLE001  # a package of others may raise anything
        return Found(module, package, version(package), str(error).strip().splitlines()[0])
    return Found(module, package, version(package))


def rows(taskset_id: str, settings: Mapping[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
    """The taskset's tasks as rows of a prompt file, `limit` at most. Raises NotFound and InvalidArgument."""
    config = _config({**settings, "taskset": {**settings.get("taskset", {}), "id": taskset_id}})
    tasks = vf.load_taskset(config.taskset)
    if limit is None and not tasks.bounded:
        raise InvalidArgument(f"taskset {taskset_id} makes tasks without end: say how many with --limit N")
    kept = config.model_dump(mode="json", exclude_unset=True)
    for task in _made(islice(tasks, limit), taskset_id):
        yield {
            "prompt": _prompt(task),
            "metadata": {METADATA: {"config": kept, "task": task.data.model_dump(mode="json")}},
        }


def _made(tasks: Iterator[Any], taskset_id: str) -> Iterator[Any]:
    """Raises FailedPrecondition with the taskset's words: many read data that is not here."""
    try:
        yield from tasks
    except Exception as error:  # of a package of others
        said = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        raise FailedPrecondition(f"taskset {taskset_id} made no tasks: {type(error).__name__}: {said}") from error


def _config(settings: Mapping[str, Any]) -> Any:
    """The environment's settings, with each agent's program on this machine. Raises NotFound and InvalidArgument."""
    taskset_id = settings["taskset"]["id"]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a taskset may be a module of this folder
    try:
        taskset_class(taskset_id)
    except ModuleNotFoundError as error:
        known = [each.id for each in tasksets()]
        raise NotFound(
            f"no taskset {taskset_id}{did_you_mean(taskset_id, known)}; installed: {', '.join(known)} ({error.msg})"
        ) from error
    except Exception as error:  # of a package of others
        raise InvalidArgument(f"taskset {taskset_id} does not load: {type(error).__name__}: {error}") from error
    config_type = vf.env_config_type(taskset_id, settings.get("id") or "")
    filled = dict(settings)
    for name, field in config_type.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            given = filled.get(name, {})
            filled[name] = {
                "runtime": {"type": "subprocess"},
                **({"harness": {"id": _NO_CODE}} if vf.default_harness_id(taskset_id) == "bash" else {}),
                **given,
            }
    try:
        config = config_type.model_validate(filled)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise InvalidArgument(f"taskset {taskset_id}: {said}: give settings with --set NAME=VALUE") from error
    for name, harness in config.agent_harnesses().items():
        if getattr(config, name).runtime.type == "subprocess" and vf.load_harness(harness).EXECUTES_CODE:
            raise FailedPrecondition(
                f"the harness {harness.id} of {taskset_id} runs what the policy writes on this machine: put it into a "
                f"container with --set {name}.runtime.type=podman (or docker)"
            )
    return config


def _prompt(task: Any) -> Any:
    """The messages that the policy sees first; the task's name where the environment opens the conversation."""
    data = task.data
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or ()
    said = [each if isinstance(each, dict) else message_to_wire(each) for each in asked]
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *said] or data.name or f"task {data.idx}"


async def run(args: Any, task: Any, base_url: str) -> float | dict[str, float]:
    """Plays one row: the agent of `headrace env train`. What goes wrong in the environment fails the sample.

    With --reward-key reward it returns a dict, which holds the environment's single rewards and metrics as well.
    """
    row = task.metadata.get(METADATA)
    if row is None:
        raise InvalidArgument(f"the row has no metadata.{METADATA}: write rows with `headrace env export`")
    environment = _environment(row["config"])
    kind = environment.taskset.task_type()
    made = kind(kind.data_type().model_validate(row["task"]), environment.taskset.config.task)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="HEADRACE_SESSION_KEY")
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(made, context)
    return _reward(episode, with_parts=bool(args.get("reward_key")))


def _environment(config: Mapping[str, Any]) -> Any:
    """One for each sample: its servers are attributes, which samples beside it would replace."""
    beside = str(Path(sys.executable).parent)  # where uv is, which starts programs
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
    return vf.load_environment(_config(config))


def _reward(episode: Any, *, with_parts: bool) -> float | dict[str, float]:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without a verdict"
        raise RuntimeError(f"the environment failed: {said}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(names := {trace.agent.name for trace in trained}) != 1:
        raise InvalidArgument(f"the environment trains {len(names)} agents at once: a session has one reward")
    total: float = sum(trace.reward for trace in trained) / len(trained)
    if not with_parts:
        return total
    scores = {name: each.score for trace in trained for name, each in trace.rewards.items() if each is not None}
    metrics = {name: value for trace in trained for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **scores, REWARD: total}
