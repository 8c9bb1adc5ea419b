"""What an engine of two machines has to do, whichever way its processes are started: `story`.

`python -m tests.support.engines.two_machines FOLDER NAMESPACE HERE THERE` runs it on the host that it is started on, an
address of which is HERE, and on the one of that namespace.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from headrace.job.schema.job import Job
from headrace.rpc.net import Address, free_port
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory, EngineNode, NodesProcess, SglangProcess, node_log
from services.rollout.fleet_build import slot_options, slots_of
from services.rollout.production.generator import Generator
from services.rollout.publication.receiver import Receiver
from tests.support.engine_stack import PROMPT, Stack, a_group, hugging_face_log_probs, publish, shifted
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.models.tiny_model import make_tiny_qwen3

_WITH_MEMORY_OF_ITS_OWN = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
"""Ranks that see the same shared memory are on one machine to SGLang, and meet at 127.0.0.1."""


def job_of(folder: Path) -> Job:
    """One engine of a tensor rank on each of two machines."""
    checkpoint = folder / "model" if (folder / "model").exists() else make_tiny_qwen3(folder / "model")
    placement = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    return Job.model_validate(
        {
            "model": {"hf_checkpoint": checkpoint},
            "placement": placement,
            "sglang": {"nnodes": 2, "max_total_tokens": 4096},
        }
    )


def on_two_hosts(job: Job, folder: Path, *, here: str, there: str, starter: list[str]) -> EngineFactory:
    """Machine 0 is this host, and `starter` begins a command on the other."""

    def factory(number: int) -> NodesProcess:
        first = EngineNode(0, Address(here, free_port(here)), is_far=True)
        nodes = (first, replace(first, rank=1, starter=starter))
        options, log = slot_options(job)(number), folder / f"engine-{number}.log"
        return NodesProcess(
            [
                SglangProcess(
                    replace(options, host=host), number, node_log(log, node.rank), has_accelerator=False, node=node
                )
                for host, node in zip((here, there), nodes, strict=True)
            ]
        )

    return factory


async def story(job: Job, factory: EngineFactory, here: str = "127.0.0.1") -> None:
    """It generates, takes weights from a group that all its ranks join, loses machine 1, and comes back with them."""
    routing, timing = RememberedRouting(), FleetTiming(start_seconds=800, check_interval_seconds=0.5)
    fleet = Fleet(1, slots_of(job), factory, routing, timing)
    model = AutoModelForCausalLM.from_pretrained(job.model.hf_checkpoint, dtype=torch.float32)
    await fleet.start()
    try:
        await _told(fleet, model, job.model.hf_checkpoint, routing, here)
    finally:
        await fleet.stop()


async def _told(fleet: Fleet, model: torch.nn.Module, checkpoint: Path, routing: RememberedRouting, here: str) -> None:
    (engine,) = fleet.engines
    process = engine.process
    assert isinstance(process, NodesProcess)
    assert routing.urls == {process.nodes[0].url}
    stack = Stack(checkpoint, model, fleet, Receiver(fleet), Generator(engine.client, fleet.weights), None, here)  # type: ignore[arg-type]
    await _generates(stack, 0)
    sender = a_group(here)
    committed = await publish(stack, sender, shifted(model, 0.05), version=1, checksums={})  # type: ignore[arg-type]
    assert committed.engine_ids == ("engine-0",)
    await _generates(stack, 1)
    await publish(stack, sender, shifted(model, 0.05), version=2, checksums={})  # type: ignore[arg-type]

    victim = process.nodes[1]
    assert isinstance(victim, SglangProcess)
    os.killpg(victim.pid, signal.SIGKILL)
    await _until(lambda: engine.state is not EngineState.READY)
    assert "on machine 1" in engine.trouble
    await _until(lambda: engine.state is EngineState.STALE)
    assert engine.restarts == 1
    assert all(node.exit_code is not None for node in process.nodes), "the other machine's process ended with it"
    stack = replace(stack, generator=Generator(engine.client, fleet.weights))
    served = dict(model.named_parameters())
    await publish(stack, a_group(here), served, version=2, checksums={}, engine_ids=("engine-0",))
    assert engine.state is EngineState.READY
    await _generates(stack, 2)


async def _generates(stack: Stack, version: int) -> None:
    """Its log-probs are those of the whole model."""
    params = SamplingParams(max_new_tokens=24)
    found = await stack.generator.generate(PROMPT, params, request_id=f"of-{version}", seconds=240)
    assert [span.policy_version for span in found.policy_ranges] == [version]
    expected = hugging_face_log_probs(stack.model, PROMPT, found.tokens)
    assert torch.allclose(torch.tensor(found.log_probs), expected, atol=1e-4)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(800):
        while not condition():  # another party's state
            await asyncio.sleep(0.1)


async def _main(folder: Path, namespace: str, here: str, there: str) -> None:
    job = job_of(folder)
    starter = ["ip", "netns", "exec", namespace, "sh", "-c", _WITH_MEMORY_OF_ITS_OWN, "sh"]
    await story(job, on_two_hosts(job, folder, here=here, there=there, starter=starter), here)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), *sys.argv[2:]))
