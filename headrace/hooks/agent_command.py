"""Plays a task by a command line: `--agent-command "codex exec …"`, or `played(…)` in an agent function of one's own.

The command has a fresh folder to work in and one as its home, the session's URL in the variables that OpenAI's and
Anthropic's clients read, and no other variables of this process but those that find programs and servers. When it ends,
or its time is over, all that it has started is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import Aborted, ConfigError
from headrace.hooks.agent import Task
from headrace.hooks.args import HookArgs
from headrace.hooks.reward import Reward
from headrace.job.schema.production import COMMAND_AGENT
from headrace.process.child import Child

_KEY = "headrace"  # the session's address is the key
_INHERITED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "TERM", "TMPDIR", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
)
_FIELD = "agent_command"
_LAST_LINES = 8
_PLACEHOLDER = re.compile(r"\{(prompt|base_url|here)\}")


async def run(args: HookArgs, task: Task, base_url: str) -> Reward | None:
    """Plays `--agent-command`. The reward is that of `--agent-reward-command`; None, for the job's scorer, without one.

    Raises Aborted when a command fails.
    """
    if args.agent_command is None:
        raise ConfigError(f"{COMMAND_AGENT} plays --agent-command: give one", field=_FIELD)
    async with played(args.agent_command, task, base_url) as left:
        command = args.agent_reward_command
        return None if command is None else await scored(command, task, left)


@dataclass(frozen=True, slots=True)
class Played:
    """What a command has left, until the block ends."""

    folder: Path
    """In which it worked."""
    output_file: Path
    """What it wrote, errors included."""


@asynccontextmanager
async def played(command: str, task: Task, base_url: str) -> AsyncIterator[Played]:
    """Runs the command in a fresh folder, which is removed with the block.

    `{prompt}`, `{base_url}` and `{here}` in a word of it stand for the task's prompt, the session's URL and the folder
    of this process; without `{prompt}` the prompt is on its standard input. Raises Aborted, with its last lines, for an
    exit code other than 0.
    """
    prompt = prompt_text(task)
    words = words_of(command, prompt=prompt, base_url=base_url)
    with tempfile.TemporaryDirectory(prefix="headrace-task-") as root:
        left = Played(Path(root, "work"), Path(root, "output.log"))
        left.folder.mkdir()
        stdin = Path(root, "prompt.txt")
        stdin.write_text("" if "{prompt}" in command else prompt)
        variables = {
            **_variables(root, task),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": _KEY,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": _KEY,
        }
        code, last_lines = await _run(words, left.output_file, variables, left.folder, stdin)
        if code != 0:
            raise Aborted(f"the agent's command {words[0]} ended with code {code}: {last_lines}", reason="HOOK_RAISED")
        yield left


async def scored(command: str, task: Task, left: Played) -> Reward:
    """Runs a command in the folder that was played in, and reads its reward.

    That is its last line where it is a number or a JSON object; otherwise code 0 is 1 and code 1 is 0. Raises Aborted
    for other codes. HEADRACE_LABEL is the row's label, HEADRACE_OUTPUT the file with what the agent wrote.
    """
    root = str(left.folder.parent)
    output, nothing = Path(root, "reward.log"), Path(os.devnull)
    label = task.label if isinstance(task.label, str) else json.dumps(task.label)
    variables = {**_variables(root, task), "HEADRACE_LABEL": label, "HEADRACE_OUTPUT": str(left.output_file)}
    words = words_of(command)
    code, last_lines = await _run(words, output, variables, left.folder, nothing)
    if code == 0 and (value := _reward_of(last_lines.rpartition("\n")[2])) is not None:
        return value
    if code in (0, 1):
        return float(code == 0)
    raise Aborted(f"the reward's command {words[0]} ended with code {code}: {last_lines}", reason="HOOK_RAISED")


def of_commands(
    function_path: str | None, command: str | None, reward_command: str | None
) -> tuple[str | None, dict[str, str | None]]:
    """Returns (the agent's function, the options that it reads). Raises ConfigError for those that exclude others."""
    if command is None:
        if reward_command is not None:
            raise ConfigError("--agent-reward-command scores what --agent-command has done: give both", field=_FIELD)
        return function_path, {}
    if function_path not in (None, COMMAND_AGENT):
        raise ConfigError(
            f"--agent-command and --agent-function-path {function_path} both play: give one", field=_FIELD
        )
    for each in (command, reward_command):
        _ = each and words_of(each)
    return COMMAND_AGENT, {"agent_command": command, "agent_reward_command": reward_command}


def words_of(command: str, **values: str) -> list[str]:
    """Returns the words of a command line, with values in place of `{name}`, and of `{here}`.

    Raises ConfigError for one without a program that is here.
    """
    values |= {"here": os.getcwd()}
    try:
        words = [_PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) for word in shlex.split(command)]
    except ValueError as error:
        raise ConfigError(f"command {command!r:.200}: {error}") from error
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ConfigError(f"command {command!r:.200}: there is no program {(words or [''])[0]!r} on PATH: install it")
    return [str(Path(program).absolute()), *words[1:]]


def prompt_text(task: Task) -> str:
    """Returns the prompt as one text; of messages their contents."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n\n".join(str(message.get("content") or "") for message in task.prompt)


def _variables(root: str, task: Task) -> dict[str, str]:
    """What a command knows of its task: the label is not for the agent."""
    home = Path(root, "home")
    home.mkdir(exist_ok=True)
    known = {"prompt": task.prompt, "metadata": task.metadata, "index": task.index, "evaluation": task.evaluation}
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**inherited, "HOME": str(home), "HEADRACE_TASK": json.dumps(known, default=str)}


async def _run(
    words: list[str], log_file: Path, variables: Mapping[str, str], folder: Path, stdin: Path
) -> tuple[int, str]:
    """Returns the exit code, and the last lines of what it wrote."""
    child = Child(words, log_file, variables, inherits=False, folder=folder, stdin=stdin)
    try:
        await child.start()
        code = await child.wait()
    finally:
        await asyncio.shield(child.stop(grace_seconds=0.0))
    return code, child.last_lines(_LAST_LINES)


def _reward_of(line: str) -> Reward | None:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) and not isinstance(value, bool) else None
