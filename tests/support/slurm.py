"""A real Slurm for tests: a controller and two nodes, each a slurmd in a network namespace with an address of its own.

All of it is in a folder of the test, and ends with the block.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts.hosts import Host, network
from tests.support.processes.training_run import ROOT

NODES = ("n1", "n2")
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
"""Programs that this machine lacks: Debian has them in slurm-wlm and munge."""

_START_SECONDS = 60.0
_CONTROLLER_PORT, _NODE_PORT = 17_000, 17_001
_SLURM_CONF = """
ClusterName=headrace
SlurmctldHost={machine}({controller})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
SchedulerParameters=batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
"""Jobs of `urgent` push out those of `main`, which have their grace and go back into the queue."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """The cluster, as a person on its first node has it."""

    first: Host
    folder: Path

    async def said(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """What a command prints that ends by itself and does not fail."""
        return await self.first.said(*words, environment=self._environment | (environment or {}))

    async def submit(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """`sbatch`; returns the job's id."""
        return (await self.said("sbatch", "--parsable", *words, environment=environment)).strip()

    async def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED."""
        return (await self.said("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")).strip()

    async def until_state(self, job: str, *states: str) -> str:
        """Waits until the job is in one of the states."""
        while (state := await self.state(job)) not in states:
            await asyncio.sleep(0.2)
        return state

    async def until_idle(self) -> None:
        """Waits until the controller and both nodes answer, and nothing runs."""
        words = ("bash", "-c", "sinfo --noheader --format='%T %D' || true")
        while (await self.said(*words)).strip() != f"idle {len(NODES)}":
            await asyncio.sleep(0.2)

    @property
    def _environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}


@asynccontextmanager
async def slurm(folder: Path) -> AsyncIterator[Slurm]:
    """Jobs have ended when the block is left. Skips the test where no network namespace can be made."""
    with network(NODES) as hosts:
        nodes = [hosts.hosts[name] for name in NODES]
        _write(folder, nodes)
        cluster = Slurm(nodes[0], folder)
        async with AsyncExitStack() as stack:
            for words in (
                _munged(folder),
                _inside(nodes[0], "slurmctld", "-D", "-i"),
                *(_inside(node, "slurmd", "-D", "-N", node.name) for node in nodes),
            ):
                await stack.enter_async_context(_running(folder, words))
            await _answers(cluster)
            try:
                yield cluster
            finally:
                await cluster.said("scancel", "--partition=main")
                await cluster.said("scancel", "--partition=urgent")
                await asyncio.wait_for(cluster.until_idle(), 120)


def _write(folder: Path, nodes: list[Host]) -> None:
    folder.mkdir()
    machine = socket.gethostname()
    lines = [
        f"NodeName={node.name} NodeHostname={machine} NodeAddr={node.address} Port={_NODE_PORT + number} CPUs=4"
        for number, node in enumerate(nodes)
    ]
    (folder / "slurm.conf").write_text(
        _SLURM_CONF.format(
            machine=machine,
            controller=nodes[0].address,
            controller_port=_CONTROLLER_PORT,
            folder=folder,
            nodes="\n".join(lines),
        )
    )
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))


def _munged(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["munged", "--foreground", "--force", *(f"--{flag}={folder}/munge.{name}" for flag, name in files.items())]


def _inside(node: Host, *words: str) -> list[str]:
    """`ip netns exec` would hide /sys/fs/cgroup, which slurmd wants to see."""
    return ["nsenter", f"--net=/run/netns/{node.namespace}", *words]


@asynccontextmanager
async def _running(folder: Path, words: list[str]) -> AsyncIterator[None]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "SLURM_"))}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    with (folder / "daemons.log").open("ab") as output:
        daemon = await asyncio.create_subprocess_exec(*words, env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        if daemon.returncode is None:
            daemon.terminate()
        try:
            await asyncio.wait_for(daemon.wait(), 60)
        except TimeoutError:
            daemon.kill()
            await daemon.wait()


async def _answers(cluster: Slurm) -> None:
    """Raises AssertionError with what the daemons say when the nodes are not there in time."""
    try:
        await asyncio.wait_for(cluster.until_idle(), _START_SECONDS)
    except TimeoutError:
        raise AssertionError((cluster.folder / "daemons.log").read_text(errors="replace")) from None
