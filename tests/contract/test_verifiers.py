"""Tasksets of the package `verifiers` are exported and played, from a Python of their own.

`make examples` sets that Python up and names it in HEADRACE_VERIFIERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.trajectory import Status
from tests.support.agent_hosts import host, lending
from tests.support.agents import require_as_sampled

PYTHON = os.environ.get("HEADRACE_VERIFIERS_PYTHON", "")
TASKSETS = Path(__file__).parents[1] / "support" / "tasksets"
EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers"
AGENT = "headrace.environments.verifiers.run"

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="long: make examples sets HEADRACE_VERIFIERS_PYTHON"),
    pytest.mark.timeout(900),
]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(TASKSETS), str(EXAMPLE))))


def env(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYTHON, "-m", "headrace.cli.main", "env", *words], capture_output=True, text=True)


def exported(folder: Path, taskset: str, *words: str) -> list[dict[str, Any]]:
    out = folder / "rows.jsonl"
    ended = env("export", taskset, "--out", str(out), *words)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


async def played(folder: Path, row: dict[str, Any], count: int = 1) -> Any:
    async with (
        lending(folder, num_prompts=0, max_turns=4) as (made, _, _, address),
        host(address, "--agent-function-path", AGENT, python=PYTHON),
    ):
        return await made.play(count, metadata=row["metadata"])


def test_the_tasksets_of_verifiers_are_listed() -> None:
    listed = json.loads(env("list", "--json").stdout)
    assert {"harbor", "nemo_gym", "openenv", "textarena"} <= {each["id"] for each in listed}


async def test_a_task_is_played_from_its_row_and_its_rewards_are_the_samples(tmp_path: Path) -> None:
    rows = exported(tmp_path, "additions", "--set", "taskset.num_tasks=3", "--set", "taskset.largest=0")
    assert [row["prompt"][-1] for row in rows] == [{"role": "user", "content": "0 + 0 ="}] * 3
    for sample in await played(tmp_path, rows[0], count=2):
        require_as_sampled(sample)
        assert (sample.failure, sample.reward) == (None, 0.0)
        assert "8 + 4 =" in sample.prompt  # the task's own messages


async def test_an_error_of_the_environment_fails_the_sample(tmp_path: Path) -> None:
    (row,) = exported(tmp_path, "broken")
    (sample,) = await played(tmp_path, row)
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert "the scorer is broken" in sample.failure.message


async def test_tools_of_a_taskset_are_offered_to_the_policy(tmp_path: Path) -> None:
    (row,) = exported(tmp_path, "with_tool")
    (sample,) = await played(tmp_path, row)
    assert sample.failure is None
    assert "multiply" in sample.prompt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "no taskset nothing"),
        (["additions", "--set", "taskset.size=3"], "taskset.size"),
        (["additions", "--set", "agent.harness.id=bash"], "podman"),
        (["endless"], "--limit"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_way_out(tmp_path: Path, words: list[str], said: str) -> None:
    ended = env("export", *words, "--out", str(tmp_path / "rows.jsonl"))
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_endless_taskset_is_exported_up_to_its_limit(tmp_path: Path) -> None:
    assert len(exported(tmp_path, "endless", "--limit", "4")) == 4


@pytest.mark.parametrize("taskset", ["guess", "reasoning", "spelling", "with_tool"])
def test_a_taskset_trains_three_steps_with_a_real_engine(taskset: str, tmp_path: Path) -> None:
    """The example trains a fifth, additions."""
    shutil.copy(EXAMPLE / "job.toml", tmp_path)
    python = os.path.abspath(PYTHON)
    small = [
        "--num-rollout",
        "3",
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "3",
        "--micro-batch-size",
        "6",
    ]
    words = ["env", "train", taskset, "job.toml", "--python", python, *small]
    headrace = [sys.executable, "-m", "headrace.cli.main"]
    assert subprocess.run([*headrace, *words], cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert subprocess.run([*headrace, "audit", str(run)]).returncode == 0
    trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss/policy" in row for row in trained) == 3
