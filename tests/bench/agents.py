"""`make bench`: response tokens a second of agents that speak OpenAI's protocol, beside a bare loop at the router.

`python -m tests.bench.agents MODEL`: a real engine and both kinds of conversation in turn, as many at once with as many
turns. The bare loop sends token ids and appends what comes, and between them the tokens that the chat template writes.
Agents are the `openai` package in headrace's worker processes, with one HTTP client for each process, as the bare loop
has one. Their requests go through the endpoint, and their sessions are recorded and become samples. CPU seconds are
those of the engine and of all other processes here.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
from prometheus_client import CollectorRegistry

from headrace.job.schema.job import Job
from headrace.rpc.log import drop_logs
from services.buffer.store.memory import MemoryStore
from services.rollout.agents.sampler import AgentSampler
from services.rollout.build import rollout_service
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.fleet_build import sglang_factory
from services.rollout.production.sampling import SampleRequest
from services.rollout.service import RolloutService
from tests.support.processes.buffer_server import served_buffer

QUESTION = "Tell me a long story about a river and a mill."
FURTHER = "And then?"
AGENT = f"""
from functools import cache

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

http = cache(DefaultAsyncHttpxClient)


async def run(args, task, base_url):
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=http())
    messages = [{{"role": "user", "content": task.prompt}}]
    for _ in range(args.max_turns):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({{"role": "assistant", "content": answer.choices[0].message.content}})
        messages.append({{"role": "user", "content": {FURTHER!r}}})
    return 0.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    drop_logs()
    asyncio.run(bench(args.model, args.at_once, args.turns, args.tokens, args.rounds))


async def bench(model: Path, at_once: int, turns: int, tokens: int, rounds: int) -> None:
    """Prints a row."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        async with served_buffer(MemoryStore()) as (_, server):
            await _measured(Path(name), server.address, model, at_once, turns, tokens, rounds)


async def _measured(
    folder: Path, buffer_address: str, model: Path, at_once: int, turns: int, tokens: int, rounds: int
) -> None:
    (folder / "agent.py").write_text(AGENT)
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": model},
            "services": {"buffer_address": buffer_address, "reward_address": "127.0.0.1:9"},
            "rollout": {
                "rollout_batch_size": 1,
                "n_samples_per_prompt": at_once,
                "rollout_max_response_len": tokens,
                "agent_function_path": f"{folder / 'agent.py'}:run",
                "max_turns": turns,
            },
        }
    )
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    service = rollout_service(job, factory, folder, CollectorRegistry())
    await service.start()
    try:
        pairs = [
            (
                await _rate(lambda: _bare(service, at_once, turns, tokens)),
                await _rate(lambda: _agents(service, at_once, tokens)),
            )
            for _ in range(rounds + 1)
        ][1:]  # the first round warms up
    finally:
        await service.stop()
    print(f"{at_once} conversations of {turns} turns, {rounds} rounds: tokens, bare loop and agents")
    for number, of in enumerate(("a second", "a CPU second")):
        bare, agents = (statistics.median(rates[number] for rates in way) for way in zip(*pairs, strict=True))
        ratios = sorted(agent[number] / alone[number] for alone, agent in pairs)
        said = f"{bare:6.1f} {agents:6.1f}   {statistics.median(ratios):.2f}× ({ratios[0]:.2f}–{ratios[-1]:.2f}×)"
        print(f"  {of:14} {said}")


async def _rate(work: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """Tokens a second and tokens a CPU second."""
    cpu, begun = _cpu_seconds(), time.monotonic()
    tokens = await work()
    return tokens / (time.monotonic() - begun), tokens / (_cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    """Of this process and all that it has started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def _bare(service: RolloutService, at_once: int, turns: int, tokens: int) -> int:
    encoder = service.parts.encoder
    asked, answer = [{"role": "user", "content": QUESTION}], {"role": "assistant", "content": "ANSWER"}
    prompt = encoder.encode_messages(asked, None).tokens
    text = encoder.render([*asked, answer, {"role": "user", "content": FURTHER}], None)
    further = encoder.tokens_of_rendered(text.rpartition("ANSWER")[2])
    params = {"max_new_tokens": tokens, "temperature": 1.0}

    async def converse(http: aiohttp.ClientSession) -> int:
        seen, written = list(prompt), 0
        for _ in range(turns):
            body = {"input_ids": seen, "sampling_params": params, "return_logprob": True}
            async with http.post(f"{service.parts.router_url}/generate", json=body) as reply:
                answer = await reply.json()
            made = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
            seen, written = [*seen, *made, *further], written + len(made)
        return written

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        return sum(await asyncio.gather(*(converse(http) for _ in range(at_once))))


async def _agents(service: RolloutService, at_once: int, tokens: int) -> int:
    sampler = service.parts.sampler
    assert isinstance(sampler, AgentSampler)
    prompt = service.parts.encoder.encode_text(QUESTION)
    params = SamplingParams(max_new_tokens=tokens)
    requests = [SampleRequest(f"g/1/{i}", "g", i, prompt, None, {}, params) for i in range(at_once)]
    samples = await sampler.sample_all(requests, evaluation=False)
    for sample in samples:
        assert sample.failure is None, sample.failure
    return sum(int(sample.loss_mask.sum()) for sample in samples)


if __name__ == "__main__":
    main()
