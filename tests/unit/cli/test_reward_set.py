"""`headrace reward set`: a live run gets another reward function, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.cli.main import main
from headrace.client.reward import RewardClient
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.score import Score, ScoreItem
from tests.unit.cli.test_tls_of_runs import Up, until_serving

_ITEM = ScoreItem("a", "1 + 1 =", "2", "2")
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


async def test_the_new_function_scores_and_one_that_fails_its_trial_is_refused(
    job_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "rewards.py").write_text(_FUNCTIONS)
    address = f"127.0.0.1:{free_port()}"
    flags = ("--reward-address", address, "--custom-rm-path", f"{tmp_path}/rewards.py:first", "--insecure")
    async with Up(tmp_path, job_file, *flags, service="reward") as process, RewardClient(address) as client:
        await until_serving(address, process)
        (run,) = (tmp_path / "runs").iterdir()
        monkeypatch.chdir(tmp_path)

        async def reward_set(path: str) -> int:
            return await asyncio.to_thread(main, ["reward", "set", path, str(run)])

        async def score() -> Score:
            (result,) = await client.score([_ITEM], deadline_seconds=60)
            assert isinstance(result, Score), result
            return result

        before = await score()
        assert await reward_set("rewards.py:fails") == 2
        assert await reward_set("rewards.py:no_reward") == 2
        assert await score() == before
        assert await reward_set("rewards.py:second") == 0
        after = await score()
        assert (before.value, after.value) == (0.25, 0.75)
        assert (before.scorer, before.scorer_version) != (after.scorer, after.scorer_version)


def test_without_a_reward_service_here_it_says_how_to_start_one(tmp_path: Path, capsys, load_with) -> None:
    job = load_with("--run-dir", str(tmp_path / "runs"))
    run = RunFolder.of(job)
    run.create(job)
    run.write_services({"reward": ServiceEntry("127.0.0.1:1", None, None)})
    assert main(["reward", "set", "a.b", str(run.path)]) == 1
    assert "headrace up reward" in capsys.readouterr().err
