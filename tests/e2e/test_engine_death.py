"""An engine is killed in the middle of a real run: the run goes on without it, and takes it in again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.cli.main import main
from headrace.client.rollout import RolloutClient
from tests.long_forms import whole_run
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun, consumed_by_step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), whole_run]

STEPS = 16
VOWELS = '''
async def vowels(args, sample, **kwargs):
    """Share of the response's characters that are vowels."""
    return sum(character in "aeiou" for character in sample.response) / max(len(sample.response), 1)
'''


async def test_an_engine_killed_in_mid_run_comes_back_with_the_served_weights(tmp_path: Path) -> None:
    (tmp_path / "vowels.py").write_text(VOWELS)
    run = TrainingRun(
        tmp_path, make_tiny_qwen3(tmp_path / "model"), "--custom-rm-path", f"{tmp_path}/vowels.py:vowels",
        "--num-rollout", str(STEPS), "--actor-num-gpus-per-node", "1",
    )  # fmt: skip
    async with run.started():
        await run.until_step(2)
        async with RolloutClient(run.folder.services()["rollout"].address) as rollout:
            survivor, victim = (await rollout.get_fleet()).engines
            assert victim.state == pb.ENGINE_STATE_READY
            os.kill(engine_pid(run, victim), signal.SIGKILL)
            await run.until_step(6)  # published to the survivor alone meanwhile
            await rollout.pause_production()  # the trainer waits for a batch, and looks after the engines
            restored = await until_all_serve(run, rollout)
            await rollout.resume_production()
        await run.finished()

    assert [(e.engine_id, e.restarts) for e in restored.engines] == [(survivor.engine_id, 0), (victim.engine_id, 1)]
    assert len({engine.weights_digest for engine in restored.engines}) == 1
    begun = [event["engines"] for event in run.events("rollout") if event["event"] == "publication_begun"]
    assert [survivor.engine_id] in begun, "the survivor was published to alone"
    assert [victim.engine_id] in begun, "and so was the one that came back: the survivor did not pause"
    assert begun[-1] == [survivor.engine_id, victim.engine_id]
    failed = [event for event in run.events("trainer") if event["event"] == "publication_failed"]
    assert len(failed) <= 1, "but for the broadcast that the kill may have hit, which is made again"

    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    assert sorted(consumed_by_step(await run.history())) == list(range(STEPS))
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0


async def until_all_serve(run: TrainingRun, rollout: RolloutClient) -> pb.GetFleetResponse:
    """Waits until every engine is in routing with the fleet's version, and one of them was started again."""
    while True:
        assert run.is_running, run.last_words()
        fleet = await rollout.get_fleet()
        serving = [e.state == pb.ENGINE_STATE_READY and e.policy_version == fleet.policy_version for e in fleet.engines]
        if all(serving) and any(engine.restarts for engine in fleet.engines):
            return fleet
        await asyncio.sleep(0.1)  # another party's state


def is_guard(process: psutil.Process) -> bool:
    return "headrace.process.guard" in process.cmdline()


def engine_pid(run: TrainingRun, engine: pb.Engine) -> int:
    """The server's own process, below the rollout service."""
    port = engine.address.rpartition(":")[2]
    service = psutil.Process(run.folder.services()["rollout"].pid)
    (found,) = (
        child.pid
        for child in service.children(recursive=True)
        if "services.rollout.engine.launch" in child.cmdline() and port in child.cmdline() and not is_guard(child)
    )
    return found
