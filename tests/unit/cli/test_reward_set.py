"""`headrace reward …`: a live run's scorer is replaced, tried and compared, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.client.reward import RewardClient
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.sample_log import Answer, SampleLog
from headrace.score import Score, ScoreItem
from headrace.shadow_log import ShadowLog
from tests.support.ledgers.answers import answered
from tests.unit.cli.test_tls_of_runs import Up, until_serving

_ITEM = ScoreItem("a", "1 + 1 =", "2", "2", group_id="g", response_tokens=1)
_FUNCTIONS = """
async def first(args, sample, **kwargs):
    return 0.25

def second(args, samples):
    return [0.75 for _ in samples]

async def fails(args, sample, **kwargs):
    raise ValueError("no")

def no_reward(args, rollout_id, rollout_data):
    pass
"""


async def test_a_scorer_is_tried_compared_promoted_and_rolled_back_and_a_bad_one_is_refused(
    job_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "rewards.py").write_text(_FUNCTIONS)
    address = f"127.0.0.1:{free_port()}"
    flags = ("--reward-address", address, "--custom-rm-path", f"{tmp_path}/rewards.py:first", "--insecure")
    async with Up(tmp_path, job_file, *flags, service="reward") as process, RewardClient(address) as client:
        await until_serving(address, process)
        (run,) = (tmp_path / "runs").iterdir()
        monkeypatch.chdir(tmp_path)

        async def reward(*words: str) -> int:
            return await asyncio.to_thread(main, ["reward", *words, "--run", str(run)])

        async def score() -> Score:
            (result,) = await client.score([_ITEM], deadline_seconds=60)
            assert isinstance(result, Score), result
            return result

        before = await score()
        assert await reward("set", "rewards.py:fails") == 2
        assert await reward("set", "rewards.py:no_reward") == 2
        assert await score() == before
        assert await reward("shadow", "rewards.py:second") == 0
        assert await score() == before
        await _until(lambda: len(list(ShadowLog(RunFolder(run).shadow).all())) == 1)
        capsys.readouterr()
        assert await reward("diff", "--json") == 0
        assert json.loads(capsys.readouterr().out)["furthest"][0]["sample_id"] == "a"
        assert await reward("diff") == 0
        assert "headrace samples --group g" in capsys.readouterr().out
        assert await reward("canary", "--share", "1.0") == 0
        assert (await score()).value == 0.75
        assert await reward("promote") == 0
        after = await score()
        assert (before.value, after.value) == (0.25, 0.75)
        assert (before.scorer, before.scorer_version) != (after.scorer, after.scorer_version)
        assert await reward("rollback") == 0
        assert await score() == before
        assert await reward("set", "rewards.py:second") == 0
        assert await score() == after
        assert await reward("shadow", "exact_match", "--share", "0.5") == 0
        assert await reward("stop") == 0
        capsys.readouterr()
        assert await reward("status", "--json") == 0
        state: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (state["live"]["scorer"], state["candidate"]) == (f"{tmp_path}/rewards.py:second", None)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


def test_a_run_that_has_ended_is_told(tmp_path: Path, capsys, load_with) -> None:
    job = load_with("--run-dir", str(tmp_path / "runs"))
    run = RunFolder.of(job)
    run.create(job)
    run.write_services({"reward": ServiceEntry("127.0.0.1:1", None, 4_190_000)})
    assert main(["reward", "set", "math", str(run.path)]) == 1
    assert "has ended" in capsys.readouterr().err


def test_diff_without_a_comparison_says_how_to_start_one(tmp_path: Path, capsys, load_with) -> None:
    job = load_with("--run-dir", str(tmp_path / "runs"))
    run = RunFolder.of(job)
    run.create(job)
    run.write_services({})
    assert main(["reward", "diff", str(run.path)]) == 1
    assert "headrace reward shadow" in capsys.readouterr().err


def test_a_stored_run_is_scored_again_with_another_scorer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load_with, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_with("--run-dir", str(tmp_path / "runs"), "--reward-workers", "1")
    run = RunFolder.of(job)
    run.create(job)
    run.write_services({})
    for step in (1, 2):
        answers = [
            Answer.of(answered(f"g{step}/{i}", "q", said, group_id=f"g{step}", reward=1.0), step)
            for i, said in enumerate(("ab", "cd", "raise"))
        ]
        SampleLog(run.samples).write_step(step, 0, answers, 1 << 20)
    (tmp_path / "f.py").write_text(
        "def other(args, samples):\n"
        "    if any(s.response == 'raise' for s in samples) and len(samples) != 3: raise ValueError\n"
        "    return [None if s.response == 'raise' else float(s.response == 'ab') for s in samples]\n"
    )
    words = ["reward", "rescore", "f.py:other", str(run.path), "--to", "out.jsonl"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["equal"], found["live_mean"], found["shadow_mean"]) == (4, 2, 1.0, 0.5)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
    assert main([*words, "--step", "1"]) == 0
    assert "2 samples were not scored" not in (out := capsys.readouterr().out)
    assert "1 samples were not scored: SCORER_ABSTAINED" in out
    assert main(["reward", "rescore", "nothing", str(run.path)]) == 1
    assert "There are" in capsys.readouterr().err
