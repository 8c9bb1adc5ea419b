"""A real fleet of engines behind the real router, and a sender that publishes to it: what engine tests share."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from headrace.publication import Probe, TensorSpec
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.fleet import Engine, Fleet
from services.rollout.engine.process import SglangProcess
from services.rollout.engine.router import Router
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.weights.weight_group import WeightGroup
from tests.support.fakes.engine_checksums import engine_checksums, flat_bytes

PROMPT = (1, 45, 67, 89, 2)


@dataclass(frozen=True)
class Stack:
    checkpoint: Path
    model: Qwen3ForCausalLM
    fleet: Fleet
    receiver: Receiver
    generator: Generator
    router: Router | None
    host: str = "127.0.0.1"
    """The address at which engines find the sender."""


@asynccontextmanager
async def always_in_flight(stack: Stack, name: str) -> AsyncIterator[list[Generation]]:
    """Three at a time, one after the other, until the block is left; those in flight then finish.

    The block begins when all three have tokens: a request without any has nothing of the version that it began with.
    """
    finished: list[Generation] = []
    num_tokens = [0, 0, 0]
    leaving = asyncio.Event()

    async def ask(number: int) -> None:
        while not leaving.is_set():
            request_id, params = f"{name}-{number}-{len(finished)}", SamplingParams(max_new_tokens=100)
            async for so_far in stack.generator.stream(PROMPT, params, request_id=request_id, seconds=600):
                num_tokens[number] = len(so_far.tokens)
            finished.append(so_far)
            num_tokens[number] = 0

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(ask(number))
        while not all(num_tokens):  # other parties' work
            await asyncio.sleep(0.001)
        try:
            yield finished
        finally:
            leaving.set()


async def publish(
    stack: Stack,
    sender: WeightGroup,
    weights: Mapping[str, torch.Tensor],
    *,
    version: int,
    pause_mode: str = "in_place",
    checksums: Mapping[str, str] | None = None,
    engine_ids: Sequence[str] = (),
    probe_error: float = 0.0,
    killed_in_the_last_bucket: Engine | None = None,
) -> CommitResult:
    buckets = two_buckets(weights)
    specs = [[TensorSpec(name, tuple(weights[name].shape), "float32") for name in names] for names in buckets]
    plan = Plan(
        publication_id=uuid.uuid4().hex,
        epoch=1,
        policy_version=version,
        pause_mode=pause_mode,
        backend="gloo",
        deadline_seconds=240,
        buckets=dict(enumerate(specs)),
        groups=[GroupPlan(sender.name, stack.host, sender.port, tuple(range(len(buckets))), joined=sender.joined)],
        engine_ids=engine_ids,
    )
    begun = await stack.receiver.begin(plan)
    if not sender.joined:
        await asyncio.to_thread(sender.join, begun.world_size, lambda: False)
    for number, names in enumerate(buckets):
        victim = killed_in_the_last_bucket if number == len(buckets) - 1 else None
        if victim:
            signal_all(victim, signal.SIGSTOP)  # so that the sender is not through before it is killed
        flat = torch.cat([flat_bytes(weights[name]) for name in names])
        sending = asyncio.create_task(asyncio.to_thread(sender.broadcast, flat, lambda: False))
        receiving = asyncio.create_task(stack.receiver.receive(plan.publication_id, number))
        if victim:
            await asyncio.wait([sending, receiving], timeout=1.0)  # neither can end: now they are in it
            signal_all(victim, signal.SIGKILL)
        await asyncio.wait([sending, receiving])
        await receiving
        await sending
    truth = hugging_face_log_probs(stack.model, PROMPT[:1], PROMPT[1:])
    expected = engine_checksums(weights) if checksums is None else checksums
    probe = Probe(PROMPT, (truth + probe_error).tolist(), max_mean_difference=1e-3)
    return await stack.receiver.commit(plan.publication_id, expected, probe)


def a_group(host: str = "127.0.0.1") -> WeightGroup:
    return WeightGroup(f"group-{uuid.uuid4().hex}", host, "gloo", 60.0)


def signal_all(engine: Engine, number: signal.Signals) -> None:
    """To the engine and what it has started."""
    assert isinstance(engine.process, SglangProcess)
    os.killpg(engine.process.pid, number)


def two_buckets(weights: Mapping[str, torch.Tensor]) -> Sequence[Sequence[str]]:
    names = list(weights)
    return names[: len(names) // 2], names[len(names) // 2 :]


def shifted(model: Qwen3ForCausalLM, scale: float) -> dict[str, torch.Tensor]:
    """Moves the model's weights, and answers them by their names in the checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return dict(model.named_parameters())


def hugging_face_log_probs(model: Qwen3ForCausalLM, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].float()
    log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
