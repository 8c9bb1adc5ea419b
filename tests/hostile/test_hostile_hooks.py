"""User code at its worst: its call alone fails, typed and at once, the next one is right, and no process is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.client.reward import RewardClient
from headrace.errors import HeadraceError
from headrace.hooks import HookArgs, Sample, from_hook, run_generate, section_args
from headrace.hooks.buffer_filter import run_buffer_filter
from headrace.hooks.data_source.worker import read_data_source
from headrace.hooks.filter import run_filter
from headrace.job.schema.services import RewardSection
from headrace.process.linux import descendants
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.client import call
from headrace.rpc.server import Listen
from headrace.score import ScoreItem
from headrace.trajectory import Status
from services.reward.server import RewardServer
from tests.hostile import hostile_hooks as hooks
from tests.support.processes.leftovers import is_own_helper

FILE = str(Path(hooks.__file__))
ENDLESS = 300.0
"""A limit that nothing here reaches: what it does not end within is not ended at once."""

REWARDS = {
    **{f"return:{name}": {"SCORER_NOT_FINITE", "SCORER_RAISED"} for name in hooks.RETURNS},
    "return:none": {"SCORER_ABSTAINED"},
    **{name: {"SCORER_RAISED"} for name in (*hooks.RAISES, *hooks.LEAVES)},
    **{name: {"SCORER_CRASHED", "SCORER_RAISED"} for name in hooks.BREAKS},
    **{name: {"1.0"} for name in hooks.SCORES},
}


@asynccontextmanager
async def serving(**leaves: Any) -> AsyncIterator[tuple[RewardServer, RewardClient]]:
    section = RewardSection(reward_workers=1, **leaves)
    server = await RewardServer.start(section, section_args(section), Listen("127.0.0.1:0"))
    try:
        async with RewardClient(server.rpc.address) as client:
            yield server, client
    finally:
        await server.stop(0)


async def scored(client: RewardClient, *responses: str, **fields: Any) -> list[str]:
    """Each item's reward or reason, in one call that is tried once."""
    items = [pb.ScoreItem(item_id=str(i), response=response, **fields) for i, response in enumerate(responses)]
    reply = await call(client._stub.Score, pb.ScoreRequest(items=items), deadline_seconds=ENDLESS)
    for result in reply.results:
        assert len(result.error.message) < 2_100
    return [str(r.score.value) if r.HasField("score") else r.error.reason for r in reply.results]


def processes(keep: set[int]) -> list[int]:
    """What this process started since, and did not end."""
    return [pid for pid in descendants(os.getpid()) if pid not in keep and not is_own_helper(pid)]


async def until_quiet(before: set[int], most: int) -> list[int]:
    """The processes that are left, once there are no more than `most`: an end takes a moment to be seen."""
    deadline = time.monotonic() + 20
    while len(left := processes(before)) > most and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return left


async def test_every_hostile_reward_is_its_items_typed_result_and_the_next_call_is_right() -> None:
    before, found = set(descendants(os.getpid())), {}
    async with serving(custom_rm_path=f"{FILE}:reward", reward_timeout_seconds=ENDLESS) as (_, client):
        for name in REWARDS:
            (outcome,) = await scored(client, name)
            (following,) = await scored(client, "good")
            found[name] = (outcome, following, len(await until_quiet(before, 1)))  # the worker
    wrong = {n: f for n, f in found.items() if f[0] not in REWARDS[n] or f[1] != "1.0" or f[2] > 1}
    assert wrong == {}
    assert await until_quiet(before, 0) == []


async def test_hostile_items_in_one_call_leave_their_neighbours_alone() -> None:
    names = ["exit_3", "a_surrogate", "closes_descriptors", "return:a_lock", "kills_its_group", "a_daemon"]
    asked = [each for name in names for each in (name, "good")]
    async with serving(custom_rm_path=f"{FILE}:reward", reward_timeout_seconds=ENDLESS) as (_, client):
        outcomes = await scored(client, *asked)
    assert outcomes[1::2] == ["1.0"] * len(names)
    assert "1.0" not in outcomes[0:-2:2]  # one that leaves a process beside others cannot be told from them


async def test_what_does_not_end_is_ended_at_its_limit() -> None:
    before = set(descendants(os.getpid()))
    async with serving(custom_rm_path=f"{FILE}:reward", reward_timeout_seconds=1.0) as (_, client):
        found = {name: await scored(client, name, "good") for name in hooks.HANGS}
    assert found == {name: ["SCORER_TIMEOUT", "1.0"] for name in hooks.HANGS}
    assert await until_quiet(before, 0) == []


METADATA = [
    ('{"rm_type": ["math"]}', "SCORER_UNKNOWN"),
    ('{"rm_type": "' + "m" * 100_000 + '"}', "SCORER_UNKNOWN"),
    ('{"rm_type": "\\ud800"}', "ITEM_INVALID"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "ITEM_INVALID"),
    ('{"a": "' + "x" * (1 << 20) + '"}', "ITEM_INVALID"),
    ('{"a": NaN}', "ITEM_INVALID"),
    ("\0", "ITEM_INVALID"),
    ('{"pattern": "' + "(" * 5_000 + '"}', "SCORER_RAISED"),
    ('{"rm_type": "reasoning_gym", "reasoning_gym": {"answer": 1, "metadata": [1]}}', "SCORER_RAISED"),
    ('{"rm_type": "math"}', "SCORER_RAISED"),
]


async def test_what_is_wrong_with_an_item_is_the_items_error() -> None:
    found = []
    async with serving(rm_type="regex") as (_, client):
        for metadata, _ in METADATA:
            items = [
                pb.ScoreItem(item_id="bad", metadata_json=metadata, response="a"),
                pb.ScoreItem(item_id="good", metadata_json='{"pattern": "a+"}', response="a"),
            ]
            reply = await call(client._stub.Score, pb.ScoreRequest(items=items), deadline_seconds=ENDLESS)
            assert len(reply.results[0].error.message) < 2_100
            found.append([r.error.reason or r.score.value for r in reply.results])
    assert found == [[wanted, 1.0] for _, wanted in METADATA]


async def test_one_callers_slow_items_do_not_make_another_wait() -> None:
    slow = [ScoreItem(str(i), "", "a" * 60 + "!", metadata={"pattern": "(a+)+$"}) for i in range(16)]
    section = RewardSection(reward_workers=2, rm_type="regex")
    server = await RewardServer.start(section, section_args(section), Listen("127.0.0.1:0"))
    async with RewardClient(server.rpc.address) as greedy, RewardClient(server.rpc.address) as modest:
        crowd = asyncio.create_task(greedy.score(slow, deadline_seconds=ENDLESS))
        while server.pool.waiting < 14:
            await asyncio.sleep(0.01)
        quick = [ScoreItem("q", "", "a", metadata={"pattern": "a"})]
        assert [j.value for j in await modest.score(quick, deadline_seconds=ENDLESS)] == [1.0]  # type: ignore[union-attr]
        assert server.pool.waiting >= 12, "the modest caller was served before the greedy one's third pair"
        crowd.cancel()
    await server.stop(0)


async def outcome(running: Any) -> str:
    try:
        return repr(await running)
    except (WorkerError, HeadraceError) as error:
        return type(error).__name__ if len(error.message) < 2_100 else "a message without end"


async def test_every_hostile_hook_of_the_other_kinds_is_a_typed_failure(tmp_path: Path) -> None:
    pool, args, before = WorkerPool(1), HookArgs({}), set(descendants(os.getpid()))

    async def generated(label: str) -> str:
        work = (run_generate, f"{FILE}:generate", args, [Sample(label=label)], {}, False)
        ((sample,),) = await pool.run(*work, timeout_seconds=ENDLESS)
        return from_hook(sample, sample_id="s", group_id="g", index=0).status

    async def filtered(label: str) -> Sequence[Any]:
        work = (run_filter, f"{FILE}:keep", args, [Sample(label=label)])
        return await pool.run(*work, timeout_seconds=ENDLESS)

    async def chosen(label: str) -> Sequence[Any]:
        groups = [[packed(label)], [packed(label)]]
        return await pool.run(run_buffer_filter, f"{FILE}:choose", args, 0, groups, 1, timeout_seconds=ENDLESS)

    async def read(name: str) -> str:
        work = (read_data_source, f"{FILE}:Source{name}", args, 0, 1)
        return str([given.prompt.label for given in await pool.run(*work, timeout_seconds=ENDLESS)])

    kinds: list[tuple[Any, Any, str, str]] = [
        (generated, hooks.GENERATED, "good", repr(Status.COMPLETED)),
        (filtered, hooks.FILTERED, "good", repr((True, ""))),
        (chosen, hooks.CHOSEN, "good", repr(([0], []))),
        (read, hooks.SOURCES, "Good", repr("['2']")),
    ]
    wrong = {}
    try:
        for run, names, good, right in kinds:
            for name in names:
                found = (await outcome(run(name)), await outcome(run(good)))
                if not found[0].startswith(("Worker", "InvalidArgument")) or found[1] != right:
                    wrong[run.__name__, name] = found
    finally:
        await pool.close()
    assert wrong == {}
    assert await until_quiet(before, 0) == []


def packed(label: str) -> bytes:
    sample = Sample(tokens=[1], label=label, status=Sample.Status.COMPLETED)
    return from_hook(sample, sample_id="s", group_id="g", index=0).pack().SerializeToString()
