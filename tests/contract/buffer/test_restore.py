"""The commands of docs/operations.md that copy a run and bring it back, as they stand there, under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import FailedPrecondition, HeadraceError
from headrace.job.schema.services import BufferSection
from headrace.run_folder import RunFolder, ServiceEntry
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put
from tests.support.processes.buffer_server import ROOT, BufferProcess

pytestmark = pytest.mark.timeout(300)

long = pytest.mark.skipif("HEADRACE_RESTORES" not in os.environ, reason="long: make chaos sets HEADRACE_RESTORES")

NAME = "r"
SECONDS = 120.0


def documented(number: int) -> list[str]:
    """The lines of a block of commands in the section, without what they say of themselves."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = re.search(r"^## Backup and restore\n(.*?)^## ", text, re.S | re.M)
    assert section
    blocks = re.findall(r"^```bash\n(.*?)^```", section[1], re.S | re.M)
    assert len(blocks) == 2
    return [line.split("  #")[0].strip() for line in blocks[number].splitlines()]


class Run:
    """A run's folder, its buffer as a process, producers that never stop, and a trainer without a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "runs" / NAME)
        self.run.path.mkdir(parents=True)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50_000)))
        self.buffer = BufferProcess(self.run.path, prompts, buffer=BufferSection(max_staleness=30))
        self.run.write_services({"buffer": ServiceEntry(self.buffer.address, None, None)})

    async def command(self, line: str) -> str:
        """What it prints. Raises AssertionError unless it ends well."""
        words = {"HOST:PORT": self.buffer.address, "NAME": NAME}
        line = re.sub("|".join(words), lambda match: words[match[0]], line)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_shell(
            line, cwd=self.folder, env={**os.environ, "PATH": path},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        assert process.returncode == 0, f"{line}: {said.decode()}"
        return said.decode()

    async def back_up(self, name: str) -> None:
        """By the documented commands, into a folder of this name."""
        (self.folder / name).mkdir()
        for line in documented(0):
            await self.command(line.replace("BACKUP", name))

    async def bring_back(self, ledger: str, trainer: str) -> None:
        """The run's folder is gone; its ledger and its trainer's files come from these backups."""
        shutil.rmtree(self.run.ledger)
        for kept in (self.run.path / "checkpoints", *self.run.path.glob("*.jsonl")):
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
        first, second, _ = documented(1)
        await self.command(first.replace("BACKUP", ledger))
        await self.command(second.replace("BACKUP", trainer))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[BufferClient]:
        """The buffer, killed when the block ends, and a producer."""
        await self.buffer.start()
        producing = asyncio.create_task(self._produce())
        try:
            async with BufferClient(self.buffer.address, deadline_seconds=60.0) as client:
                yield client
        finally:
            producing.cancel()
            with suppress(asyncio.CancelledError):
                await producing
            await self.buffer.kill()

    async def _produce(self) -> None:
        async with BufferClient(self.buffer.address, deadline_seconds=60.0) as client:
            while True:
                with suppress(HeadraceError):  # the buffer starts or ends
                    leases = (await client.lease_groups("train", "p", 2, wait_seconds=1.0)).leases
                    await client.put_groups([complete_put(lease) for lease in leases])

    async def train(self, client: BufferClient, steps: int, *, saves: bool = True) -> None:
        """From the newest checkpoint; a trainer that is stopped has one of its last step."""
        step = self.saved_step
        record, epoch = TrainingRecord(self.run.training_record), (await client.rewind("train", step)).epoch
        for at in range(step, step + steps):
            reply = await client.lease_batch("train", epoch, at, timeout_seconds=60)
            record.append(at, Batch.of(reply))
            await client.consume("train", epoch, at, reply.digest)
            await client.set_policy_version("train", epoch, at + 1)
        if saves:
            (self.run.path / "checkpoints" / f"step-{step + steps}").mkdir(parents=True)
            await client.commit("train", epoch, step + steps)

    @property
    def saved_step(self) -> int:
        return max((int(path.name[5:]) for path in self.run.path.glob("checkpoints/step-*")), default=0)

    async def audit(self) -> str:
        return await self.command(documented(1)[2])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def test_a_backup_under_load_comes_back_by_the_documented_commands_and_the_run_goes_on(run: Run) -> None:
    async with run.serving() as client:
        await run.train(client, 3)
        before = await client.position()
        await run.back_up("copy")
        assert await client.position() > before, "producers went on meanwhile"
        await run.train(client, 2)
        with pytest.raises(FailedPrecondition, match="restore a checkpoint of step 5 or later"):
            await client.rewind("train", 3)  # as the copy's trainer would ask this ledger
    await run.bring_back(ledger="copy", trainer="copy")
    async with run.serving() as client:
        assert run.saved_step == 3
        await run.train(client, 4)
        assert "lost, doubled, unaccounted: 0 0 0" in await run.audit()


@long
async def test_steps_that_only_the_ledger_has_are_trained_again_on_the_same_batches(run: Run) -> None:
    async with run.serving() as client:
        await run.train(client, 3)
        await run.train(client, 2, saves=False)
        await run.back_up("copy")
    await run.bring_back(ledger="copy", trainer="copy")
    async with run.serving() as client:
        assert run.saved_step == 3
        assert (await client.stats("train")).step == 5
        await run.train(client, 4)
        assert "lost, doubled, unaccounted: 0 0 0" in await run.audit()
    rows = [json.loads(line) for line in run.run.training_record.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert rows[3:5] == rows[5:7]


@long
async def test_steps_that_only_the_trainer_has_are_named_by_the_audit_and_training_goes_on(run: Run) -> None:
    async with run.serving() as client:
        await run.train(client, 3)
        await run.back_up("early")
        await run.train(client, 4)
        await run.back_up("last")
    await run.bring_back(ledger="early", trainer="last")
    async with run.serving() as client:
        await run.train(client, 2)
        groups = (await client.list_groups("train", [pb.GROUP_STATE_COMMITTED], page_size=1000)).groups
        assert {7, 8} <= {group.step for group in groups}
        with pytest.raises(AssertionError, match=r"lost, doubled, unaccounted: 0 \d+ 32"):
            await run.audit()
