"""Every option that the reward service reads is in the parts that are built of a job, with the job's value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks import RewardForm
from headrace.job.schema.job import Job
from headrace.job.schema.services import RewardPart
from headrace.process.workers import WorkerPool
from headrace.rpc.server import RpcServer
from services.reward import __main__ as program
from services.reward.server import RewardServer
from tests.support.job_options import Readers, ignored, options_named_in, options_read

HOOKS = """
async def of_group(args, samples): return [1.0 for _ in samples]

class OfModel:
    def __init__(self, model_path): self.model_path = model_path
    def compute_reward(self, prompts, responses): return [1.0 for _ in responses]

def of_evaluation(args, sample): return 1.0
"""
COMMON: Readers = {
    "reward_key": [lambda server: scorer(server)._reward_key, lambda server: scorer(server)._args.reward_key],
    "reward_timeout_seconds": [
        lambda server: scorer(server)._timeout_seconds,
        lambda server: scorer(server)._args.reward_timeout_seconds,  # of the calls of a judge or a server
    ],
    "reward_workers": [lambda server: server.pool._size, lambda server: server._slow_pool._size],
    "run_dir": [lambda server: server._live._file.path.parents[1], lambda server: server._live._log.path.parents[1]],
    "insecure_sandbox": [lambda server: os.environ["HEADRACE_INSECURE_SANDBOX"] == "true"],
}
JUDGE: Readers = COMMON | {
    "rm_type": [lambda server: scorer(server).registry.default, lambda server: prepared(server.pool)[0][0]],
    "rm_url": [lambda server: scorer(server)._args.rm_url],
    "judge_url": [lambda server: scorer(server)._args.judge_url],
    "judge_model": [lambda server: scorer(server)._args.judge_model],
    "judge_prompt": [lambda server: Path(scorer(server)._args.judge_prompt)],
    "judge_scale": [lambda server: scorer(server)._args.judge_scale],
    "judge_json": [lambda server: scorer(server)._args.judge_json],
    "eval_config": [lambda server: Path(*scorer(server).registry._of_evaluations).parent / "eval.toml"],
}
GROUP: Readers = COMMON | {
    "custom_rm_path": [lambda server: users(server).path, lambda server: prepared(server.pool)[1][0][0]],
    "group_rm": [lambda server: users(server).form is RewardForm.GROUP],
}
MODEL: Readers = COMMON | {
    "custom_rm_path": [lambda server: users(server).path],
    "reward_model_path": [lambda server: Path(prepared(server.pool)[2])],
}
COMPOSED: Readers = COMMON | {
    "reward_parts": [lambda server: tuple(RewardPart(scorer=each.scorer.name) for each in composition(server).parts)],
    "reward_combine": [lambda server: composition(server).combine],
    "reward_clip": [lambda server: composition(server).clip],
}
HELD_BY_NO_PART = {
    "trace_sample_ratio": "tests/unit/test_traces.py, in a run of all services",
    "run_name": "stands in the lines of the log",
    "eval_prompt_data": "has no scorers of its own, as eval_config has",
}


def scorer(server: RewardServer) -> Any:
    (service,) = server.rpc._services
    return service.servicer._scorer


def composition(server: RewardServer) -> Any:
    return scorer(server).registry.require("composed").composition


def users(server: RewardServer) -> Any:
    return scorer(server).registry.require("custom").hook


def prepared(pool: Any) -> Any:
    """What a worker is told to load."""
    return pool._prepare.args


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "model": {"hf_checkpoint": folder},
        "run": {"run_name": "unusual", "run_dir": folder / "runs"},
        "reward": {
            "reward_key": "correct",
            "reward_timeout_seconds": 47.0,
            "reward_workers": 3,
            "insecure_sandbox": True,
            "rm_url": "http://127.0.0.1:7401/score",
            "judge_url": "http://127.0.0.1:7403/v1",
            "judge_model": "a-judge",
            "judge_prompt": folder / "judge.txt",
            "judge_scale": 7.0,
            "judge_json": True,
        },
        "eval": {"eval_config": folder / "eval.toml"},
    }


def variants(folder: Path) -> Mapping[str, tuple[Mapping[str, Any], Readers]]:
    hooks = folder / "hooks.py"
    return {
        "judge": ({"rm_type": "judge"}, JUDGE),
        "composed": (
            {"reward_parts": [{"scorer": "f1"}, {"scorer": "math"}], "reward_combine": "max", "reward_clip": (0, 0.5)},
            COMPOSED,
        ),
        "group": ({"custom_rm_path": f"{hooks}:of_group", "group_rm": True}, GROUP),
        "model": ({"custom_rm_path": f"{hooks}:OfModel", "reward_model_path": folder / "judge"}, MODEL),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hooks and evaluations of the jobs."""
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "eval.toml").write_text(
        '[[datasets]]\nname = "one"\npath = "one.jsonl"\ncustom_rm_path = "hooks.py:of_evaluation"\n'
    )
    monkeypatch.setenv("HEADRACE_INSECURE_SANDBOX", "neither")
    return tmp_path


def differences(folder: Path, job: Job, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the server that the program makes of the job: it serves nothing."""
    lines = list[str]()

    async def nothing(part: object) -> None:
        pass

    async def compare(server: RewardServer) -> None:
        lines.extend(ignored(job, server, readers))

    (folder / "job.json").write_text(job.model_dump_json())

    async def run(pool: object, function: Callable[..., object], *given: object, timeout_seconds: float) -> object:
        return function(*given)

    monkeypatch.setattr(WorkerPool, "start", nothing)
    monkeypatch.setattr(WorkerPool, "run", run)
    monkeypatch.setattr(RpcServer, "start", nothing)
    monkeypatch.setattr(RewardServer, "run_until_signal", compare)
    assert program.main(["--config", str(folder / "job.json")]) == 0
    return lines


def test_the_parts_have_the_values_that_the_job_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(program.__file__).parent
    read = options_named_in([path for path in source.rglob("*.py") if path.name != "check.py"])
    compared = set[str]()
    for name, (changes, readers) in variants(folder).items():
        of_all = sections(folder)
        job = Job.model_validate(of_all | {"reward": of_all["reward"] | dict(changes)})
        with options_read() as now:
            lines = differences(folder, job, readers, monkeypatch)
        assert not lines, f"{name}:\n" + "\n".join(lines)
        compared |= set(readers)
        read |= now
    assert sorted(read - compared - set(HELD_BY_NO_PART)) == [], "compare them above"
