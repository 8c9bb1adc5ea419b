"""A run over two buffers that `--buffer-shards 2` starts: one is killed, one start is interrupted, and nothing is lost.

Real launcher, buffers, PostgreSQL and Megatron rank; the samples need no engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.client.open import open_buffer
from tests.long_forms import whole_run
from tests.support.fakes.certain_rollout import allow, certain_rollout, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.postgres import cluster, needs_postgres
from tests.support.processes.training_run import TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(900)]

STEPS, GROUPS = 8, 4
FLAGS = (
    *("--buffer-shards", "2", "--num-rollout", str(STEPS), "--rollout-batch-size", str(GROUPS), "--save-interval", "2"),
    *("--n-samples-per-prompt", "2", "--actor-num-gpus-per-node", "1", "--micro-batch-size", "2", "--lr", "1e-4"),
    *("--reward-address", "127.0.0.1:9", "--update-weight-probe-tolerance", "1e6"),
)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """What a command says of the run, and its exit code."""
    code = main(list(words))
    return code, capsys.readouterr().out


def stored_in(kind: str) -> list[str]:
    """Flags of a run whose ledger is there."""
    return ["--buffer-store", kind, *(("--buffer-postgres", cluster()) if kind == "postgres" else ())]


@whole_run
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=needs_postgres)])
async def test_a_run_whose_shard_is_killed_and_that_is_interrupted_loses_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, supply = make_tiny_qwen3(tmp_path / "model"), asyncio.Semaphore(0)
    async with certain_rollout() as rollout:
        run = TrainingRun(tmp_path, checkpoint, *FLAGS, *stored_in(kind), "--rollout-address", rollout.address)
        folder = str(run.folder.path)
        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer"), supply))
            allow(supply, 2 * GROUPS)
            await run.until_step(2)
            killed = run.kill("buffer-1")
            allow(supply, GROUPS + 3)  # of step 4's groups a shard has two, so that each has one at least
            await run.until_step(3)
            while (again := run.folder.services()["buffer-1"].pid) in (None, killed):
                await asyncio.sleep(0.05)
            async with open_buffer(await run.address_of("buffer")) as buffer:
                while (await buffer.stats("train")).groups["READY"] < 3:
                    await asyncio.sleep(0.05)
            said = (await asyncio.to_thread(printed, capsys, "status", folder))[1]
            samples = (await asyncio.to_thread(printed, capsys, "samples", folder, "--json", "-n", "4"))[1]
        producing.cancel()
        assert again != killed
        assert re.search(r"^ *buffer +2 shards +– +step ", said, re.M)
        assert re.findall(r"^ *(buffer-\d) +127\.0\.0\.1:\d+ +\d+ +step ", said, re.M) == ["buffer-0", "buffer-1"]
        waiting = [json.loads(line)["group_id"] for line in samples.splitlines()]
        assert {int(group_id.rpartition("/")[2]) % 2 for group_id in waiting} == {0, 1}
        assert "buffer-1 ended with signal 9 (killed: out of memory?" in run.log.read_text()
        assert await asyncio.to_thread(main, ["audit", folder]) == 0  # of a run that was interrupted

        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer")))
            await run.finished()
        producing.cancel()
    assert re.search("resuming after step [23]", run.log.read_text())
    assert [row["step"] for row in run.metrics() if "samples/count" in row][-1] == STEPS
    capsys.readouterr()
    code, verdict = await asyncio.to_thread(printed, capsys, "audit", folder, "--deep")
    assert (code, verdict.splitlines()[1]) == (0, "lost, doubled, unaccounted: 0 0 0")
    assert {path.name for path in run.folder.ledger.iterdir()} == {"shard-0", "shard-1"}
    assert any(run.folder.ledger.rglob("*.sqlite")) == (kind == "sqlite")
