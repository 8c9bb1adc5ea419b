"""Harnesses that are a command line: they know a URL from their environment, a folder, and nothing of headrace."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import Aborted, ConfigError
from headrace.hooks.agent import Task
from headrace.hooks.agent_command import Played, of_commands, played, scored
from headrace.job.schema.production import COMMAND_AGENT
from headrace.trajectory import Sample
from tests.support.agent_hosts import host, lending
from tests.support.agents import producing, require_as_sampled
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

HARNESS = """
import json, os, pathlib, sys, urllib.request

assert not os.listdir() and not os.listdir(os.environ["HOME"])
assert "label" not in json.loads(os.environ["HEADRACE_TASK"])
said = [{"role": "user", "content": sys.stdin.read()}]
body = json.dumps({"model": "m", "max_tokens": 6, "messages": said}).encode()
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
asked = urllib.request.Request(url, body, {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
pathlib.Path("answer.txt").write_text(json.load(urllib.request.urlopen(asked))["content"][0]["text"])
"""
SCORES = """
import os, pathlib
assert pathlib.Path("answer.txt").read_text()
print(len(os.environ["HEADRACE_LABEL"]) / 4)
"""
URL = "http://127.0.0.1:9/sessions/s/v1"


def python(code: str) -> str:
    return shlex.join((sys.executable, "-c", code))


async def play(folder: Path, command: str, reward: str | None = None, **options: Any) -> list[Sample]:
    factory = FakeEngine(WIRE)
    commands: dict[str, Any] = {"agent_function_path": None, "agent_command": command, "agent_reward_command": reward}
    async with producing(folder, "", lambda job: lambda number: factory, num_prompts=0, **commands, **options) as made:
        return await made.play(2)


async def test_a_command_plays_a_task_in_a_folder_of_its_own_and_another_scores_it(tmp_path: Path) -> None:
    samples = await play(tmp_path, python(HARNESS), python(SCORES))
    assert [sample.reward for sample in samples] == [0.25, 0.25]
    for sample in samples:
        require_as_sampled(sample)
        assert int(sample.loss_mask.sum()) == 6


async def test_a_host_plays_its_own_command(tmp_path: Path) -> None:
    words = ("--agent-command", python(HARNESS), "--agent-reward-command", python(SCORES))
    async with lending(tmp_path, num_prompts=0) as (made, _, _, address), host(address, *words) as process:
        (sample,) = await made.play()
        process.terminate()
        said, _ = await process.communicate()
    assert (sample.failure, sample.reward) == (None, 0.25)
    assert COMMAND_AGENT.encode() in said


async def test_a_command_that_fails_or_takes_too_long_fails_its_sample_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    (failed, _) = await play(tmp_path, python("import sys; print('no model'); sys.exit(3)"))
    assert failed.failure is not None
    assert (failed.failure.reason, "code 3: no model" in failed.failure.message) == ("HOOK_RAISED", True)
    pid = tmp_path / "pid"
    sleeps = f"import os, time; os.setsid(); open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeps!r}])"
    (late, _) = await play(tmp_path, python(starts), generate_timeout_seconds=5.0)
    assert late.failure is not None
    assert late.failure.reason == "HOOK_TIMEOUT"
    async with asyncio.timeout(60):
        while psutil.pid_exists(int(pid.read_text())):
            await asyncio.sleep(0.05)


async def test_a_command_knows_little_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s")
    code = "import os, sys; print(*sorted(os.environ)); print(sys.argv[1:])"
    task = Task([{"role": "system", "content": "be brief"}, {"role": "user", "content": "it's {base_url}"}], "42")
    command = f"{python(code)} {{prompt}} --url={{base_url}} {{here}}/x.py"
    async with played(command, task, URL) as left:
        names, words = left.output_file.read_text().splitlines()
        folder = left.folder
    assert not folder.exists()
    assert "SECRET_OF_THE_HOST" not in names.split()
    assert {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "HEADRACE_TASK", "PATH"} <= {*names.split()}
    assert words == str(["be brief\n\nit's {base_url}", f"--url={URL}", f"{Path.cwd()}/x.py"])


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print('tests:\\n0.5')", 0.5),
        ('print(\'{"style": 0.5, "right": 1}\')', {"style": 0.5, "right": 1}),
        ("print('all passed')", 1.0),
        ("import sys; print('2 failed'); sys.exit(1)", 0.0),
        ("import sys; print(1.0); sys.exit(1)", 0.0),
        ("import sys; sys.exit(2)", None),
    ],
)
async def test_a_reward_is_the_last_line_or_the_exit_code(tmp_path: Path, code: str, reward: object) -> None:
    left = Played(tmp_path / "work", tmp_path / "output.log")
    left.folder.mkdir()
    if reward is None:
        with pytest.raises(Aborted, match="code 2"):
            await scored(python(code), Task("p"), left)
    else:
        assert await scored(python(code), Task("p"), left) == reward


def test_options_that_do_not_go_together_are_refused() -> None:
    assert of_commands("a.py:run", None, None) == ("a.py:run", {})
    for path, command, reward in (
        ("a.py:run", "true", None),
        (None, None, "true"),
        (None, "no-such-program-here", None),
        (None, "sh 'open", None),
        (None, "true", "no-such-program-here"),
    ):
        with pytest.raises(ConfigError):
            of_commands(path, command, reward)
