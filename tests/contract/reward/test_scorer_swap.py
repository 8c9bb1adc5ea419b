"""Another scorer while the service runs: shadow, canary, promote and roll back, over gRPC with real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.client.reward import RewardClient
from headrace.errors import ConfigError, DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from headrace.run_folder import RunFolder
from headrace.score import Score, ScoreItem
from headrace.shadow_log import Comparison, ShadowLog
from services.reward.registry import code_digest
from tests.support.processes.reward_server import served_reward
from tests.support.refusals import refused

_FUNCTIONS = """
import time

def one(args, sample): return 1.0
def two(args, sample): return 2.0
def three(args, samples): return [3.0] * len(samples)
def hangs(args, sample): time.sleep(600)
def raises(args, sample): raise ValueError("no")
"""
Rewards = dict[str, set[float]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "f.py").write_text(_FUNCTIONS)
    return f"{tmp_path}/f.py"


async def rewards(client: RewardClient, groups: int = 1, samples: int = 2, *, evaluation: bool = False) -> Rewards:
    """The rewards of each group."""
    items = [
        ScoreItem(f"g{group}/{index}", "1 + 1 =", "2", "2", group_id=f"g{group}", response_tokens=index + 1)
        for group in range(groups)
        for index in range(samples)
    ]
    results = await client.ask(items, None, deadline_seconds=120, evaluation=evaluation)
    found: Rewards = {}
    for item, result in zip(items, results, strict=True):
        assert isinstance(result, Score), result
        found.setdefault(item.group_id, set()).add(result.value)
    return found


async def change(client: RewardClient, change_id: str = "", **action: Any) -> pb.ScorerState:
    return await client.change_scorer(pb.ChangeScorerRequest(change_id=change_id, **action), deadline_seconds=60)


def trial(scorer: str = "", share: float = 1.0) -> pb.Trial:
    return pb.Trial(scorer=scorer, share=share)


async def compared(folder: Path, number: int) -> Sequence[Comparison]:
    async with asyncio.timeout(60):
        while len(found := list(ShadowLog(RunFolder(folder).shadow).all())) < number:
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def client(tmp_path: Path, path: str) -> AsyncIterator[RewardClient]:
    async with served_reward((), tmp_path, custom_rm_path=f"{path}:one") as client:
        yield client


async def test_a_scorer_goes_from_shadow_over_canary_to_every_group_and_back(
    client: RewardClient, tmp_path: Path, path: str
) -> None:
    state = await change(client, shadow=trial(f"{path}:two"))
    assert (state.candidate.scorer, state.candidate_pays, state.share) == (f"{path}:two", False, 1.0)
    assert "sha256:" in state.candidate.version
    assert await rewards(client, 4) == {f"g{group}": {1.0} for group in range(4)}  # nothing trains on the shadow
    for seen in await compared(tmp_path, 8):
        assert (seen.live_reward, seen.shadow_reward) == (1.0, 2.0)
        assert (seen.live_version, seen.shadow_version) == (state.live.version, state.candidate.version)
    assert (await client.scorer_state()).shadow == pb.ShadowCounts(compared=8)

    await change(client, canary=trial(share=0.5))
    canary = await rewards(client, 40)
    assert all(len(of_group) == 1 for of_group in canary.values())
    assert 5 < sum(of_group == {2.0} for of_group in canary.values()) < 35
    assert await rewards(client, 40) == canary  # the same groups again
    assert set().union(*(await rewards(client, 40, evaluation=True)).values()) == {1.0}

    state = await change(client, promote=pb.Promote())
    assert (state.live.scorer, state.HasField("candidate")) == (f"{path}:two", False)
    assert await rewards(client) == {"g0": {2.0}}
    state = await change(client, rollback=pb.Rollback())
    assert (state.live.scorer, list(state.former)) == ("", [])
    assert await rewards(client) == {"g0": {1.0}}


async def test_a_larger_share_keeps_the_groups_of_a_smaller_one(client: RewardClient, path: str) -> None:
    await change(client, canary=trial(f"{path}:two", 0.2))
    few = {group for group, found in (await rewards(client, 60)).items() if found == {2.0}}
    await change(client, canary=trial(share=0.6))
    many = {group for group, found in (await rewards(client, 60)).items() if found == {2.0}}
    assert few < many


async def test_set_takes_functions_of_groups_and_built_in_scorers(client: RewardClient, path: str) -> None:
    await change(client, set=f"{path}:three")
    assert await rewards(client) == {"g0": {3.0}}
    state = await change(client, set="exact_match")
    assert state.live == pb.ScorerVersion(scorer="exact_match", version=f"headrace {code_digest('exact_match')}")
    assert [each.scorer for each in state.former] == ["", f"{path}:three"]
    assert await rewards(client) == {"g0": {1.0}}


async def test_a_change_that_is_asked_for_twice_is_made_once(client: RewardClient, path: str) -> None:
    await change(client, set=f"{path}:two")
    await change(client, set=f"{path}:three")
    once = await change(client, "mine", rollback=pb.Rollback())
    assert await change(client, "mine", rollback=pb.Rollback()) == once
    assert (await client.scorer_state()).live.scorer == f"{path}:two"


async def test_a_bad_change_changes_nothing(client: RewardClient, path: str, tmp_path: Path) -> None:
    before = await client.scorer_state()
    with refused(InvalidArgument, "nowhere", "There are"):
        await change(client, set="nowhere")
    with refused(InvalidArgument, "four"):
        await change(client, set=f"{path}:four")
    with refused(InvalidArgument, "share", "1.5"):
        await change(client, canary=trial(f"{path}:two", 1.5))
    with refused(InvalidArgument, "--rm-url"):
        await change(client, set="remote_rm")
    with refused(InvalidArgument, "action"):
        await change(client)
    with refused(FailedPrecondition, "headrace reward shadow", reason="NO_CANDIDATE"):
        await change(client, promote=pb.Promote())
    with refused(FailedPrecondition, "headrace reward set", reason="NO_FORMER_SCORER"):
        await change(client, rollback=pb.Rollback())
    assert await client.scorer_state() == before
    assert await rewards(client) == {"g0": {1.0}}
    assert not RunFolder(tmp_path).scorer_state.exists()


async def test_a_shadow_that_hangs_or_raises_delays_nobody_and_is_counted(
    client: RewardClient, path: str, tmp_path: Path
) -> None:
    await change(client, shadow=trial(f"{path}:hangs"))
    for _ in range(20):
        await asyncio.wait_for(rewards(client, 70), 60)  # all but the first calls find it behind
    counts = (await client.scorer_state()).shadow
    assert counts.dropped >= 20 * 140 - 2048
    await change(client, shadow=trial(f"{path}:raises"))
    async with asyncio.timeout(60):
        while not (await client.scorer_state()).shadow.failed:
            await rewards(client)
    assert not (RunFolder(tmp_path).shadow).exists()


async def test_a_restart_continues_with_the_state_until_the_job_names_another_scorer(path: str, tmp_path: Path) -> None:
    async with served_reward((), tmp_path, custom_rm_path=f"{path}:one") as client:
        await change(client, set=f"{path}:two")
        state = await change(client, shadow=trial("exact_match", 0.5))
    async with served_reward((), tmp_path, custom_rm_path=f"{path}:one") as client:
        assert await client.scorer_state() == state
        assert await rewards(client) == {"g0": {2.0}}
    async with served_reward((), tmp_path, custom_rm_path=f"{path}:three", group_rm=True) as client:
        assert await rewards(client) == {"g0": {3.0}}


async def test_a_state_that_cannot_be_used_is_refused_with_the_way_out(path: str, tmp_path: Path) -> None:
    async with served_reward((), tmp_path, rm_type="math") as client:
        await change(client, set=f"{path}:two")
    Path(path).unlink()
    with refused(ConfigError, f"{path}:two", "reward.json"):
        async with served_reward((), tmp_path, rm_type="math"):
            pass
    RunFolder(tmp_path).scorer_state.write_text(json.dumps({"live": 3}))
    with refused(ConfigError, "reward.json"):
        async with served_reward((), tmp_path, rm_type="math"):
            pass


async def test_a_caller_that_leaves_in_the_middle_leaves_disk_and_memory_alike(
    client: RewardClient, path: str, tmp_path: Path
) -> None:
    for _ in range(5):
        leaving = asyncio.create_task(change(client, set=f"{path}:two"))
        await asyncio.sleep(0)
        leaving.cancel()
    await change(client, set=f"{path}:three")  # those before have ended
    state = await client.scorer_state()
    stored = json.loads(RunFolder(tmp_path).scorer_state.read_text())
    assert (stored["live"]["name"], stored["changes"]) == (state.live.scorer, state.changes)
    with pytest.raises(DeadlineExceeded):
        await client.change_scorer(pb.ChangeScorerRequest(change_id="late", set=f"{path}:two"), deadline_seconds=0.01)
    await change(client, "late", set=f"{path}:two")
    state = await client.scorer_state()
    stored = json.loads(RunFolder(tmp_path).scorer_state.read_text())
    assert (stored["live"]["name"], stored["changes"]) == (f"{path}:two", state.changes)


async def test_a_change_that_cannot_be_kept_is_not_made(client: RewardClient, path: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).scorer_state.mkdir()  # a folder where the file should be
    with refused(Unavailable, "cannot be kept"):
        await client.change_scorer(pb.ChangeScorerRequest(set=f"{path}:two"), deadline_seconds=1)
    assert await rewards(client) == {"g0": {1.0}}


async def test_another_service_scores_by_its_url(client: RewardClient, path: str) -> None:
    async with served_reward(rm_type="exact_match") as other:
        url = f"grpc://{other.address}"
        await change(client, set=url)
        (score,) = await client.score([ScoreItem("a", "", "2", "2")], deadline_seconds=60)
        assert score == Score(1.0, "exact_match", f"{url} headrace {code_digest('exact_match')}")
        state = await change(client, shadow=trial(f"{url}/f1"))
        assert state.candidate.scorer == f"{url}/f1"
        with refused(InvalidArgument, "f2", "exact_match"):
            await change(client, shadow=trial(f"{url}/f2"))
        async with served_reward(rm_type=f"{url}/f1") as whole:
            (score,) = await whole.score([ScoreItem("a", "", "2 3", "2")], deadline_seconds=60)
            assert (score.scorer, round(score.value, 2)) == ("f1", 0.67)
    with refused(InvalidArgument, "grpc://HOST:PORT"):
        await change(client, set="grpc://nowhere")
