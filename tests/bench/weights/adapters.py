"""What a publication of adapters costs the requests beside it: `python -m tests.bench.weights.adapters MODEL`.

Eight requests a real SGLang engine generates all the time, while adapters are written, loaded, probed and served. The
baseline is the same engine in the same seconds without a publication. With `--engines 4` four engines share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.job.model import adapted_layers
from headrace.job.schema.job import Job
from headrace.models.registry import read_architecture
from headrace.publication import TensorSpec
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.fleet_build import sglang_factory
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from services.trainer.model.lora import InitialPairs, pair_shapes, peft_names
from tests.support.fakes.fake_fleet import RememberedRouting

ROUNDS, RANK, REQUESTS, LENGTH = 12, 8, 8, 40
_WINDOW = 1.0
"""Seconds: a step of eight requests takes a tenth of one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measured(given.model, given.engines, Path(folder)))


async def _measured(model: Path, engines: int, folder: Path) -> None:
    sections = {
        "model": {"hf_checkpoint": model},
        "lora": {"lora_rank": RANK},
        "publish": {"update_weight_transport": "adapter"},
    }
    factory = sglang_factory(Job.model_validate(sections), folder, has_accelerator=await has_accelerator())
    fleet = Fleet(engines, 1, factory, RememberedRouting(), FleetTiming(start_seconds=600))
    await fleet.start()
    made: list[float] = []
    """When each token came."""
    try:
        asking = [asyncio.create_task(_ask(fleet, n, made)) for n in range(REQUESTS)]
        await asyncio.sleep(3.0)
        receiver, spans = Receiver(fleet, folder), list[tuple[float, float]]()
        for version in range(ROUNDS):
            name, files = f"e1-v{version}-0a1b2c3d", _adapter(model, version)
            began = time.monotonic()
            checksums = await asyncio.to_thread(_write, folder / name, files)
            await _publish(receiver, folder / name, version, checksums)
            spans.append((began, time.monotonic()))
            await asyncio.sleep(2 * _WINDOW)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    finally:
        await fleet.stop()
    _print(engines, made, spans[2:])


def _print(engines: int, made: list[float], spans: list[tuple[float, float]]) -> None:
    """The first spans were to warm up."""
    beside = before = 0
    for began, ended in spans:
        length = max(ended - began, _WINDOW)
        beside += sum(began <= at < began + length for at in made)
        before += sum(began - length <= at < began for at in made)
    seconds = [1000 * (ended - began) for began, ended in spans]
    print(
        f"adapters of rank {RANK}, {engines} engine(s): tokens beside a publication "
        f"{beside / before:.2f}× those before it ({before}); {statistics.median(seconds):.0f} ms from the end of a "
        f"step to the first request that may use it ({min(seconds):.0f} to {max(seconds):.0f})",
        flush=True,
    )


async def _ask(fleet: Fleet, number: int, made: list[float]) -> None:
    engine = fleet.engines[number % len(fleet.engines)]
    params = SamplingParams(max_new_tokens=LENGTH)
    for attempt in range(1_000_000):
        with fleet.weights.using_adapter() as adapter:
            seen = 0
            stream = engine.client.stream(
                (1, 45, 67, 89, number), params, request_id=f"{number}-{attempt}", cache_key="c", seconds=600,
                adapter=adapter,
            )  # fmt: skip
            async with contextlib.aclosing(stream):
                async for answer in stream:
                    made += [time.monotonic()] * (len(answer.tokens) - seen)
                    seen = len(answer.tokens)


def _adapter(model: Path, version: int) -> dict[str, torch.Tensor]:
    architecture, init = read_architecture(model), InitialPairs(RANK, "kaiming", version)
    found: dict[str, torch.Tensor] = {}
    for tensor in adapted_layers(architecture, ("all-linear",)):
        pair, shapes = init(tensor), pair_shapes(tensor, RANK)
        names = peft_names(tensor, architecture, ("all-linear",))
        found |= {names[0]: pair.a, names[1]: torch.randn(shapes[1]) * 1e-3}
    return found


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    folder.mkdir()
    names = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}


async def _publish(receiver: Receiver, folder: Path, version: int, checksums: dict[str, str]) -> None:
    plan = Plan(
        publication_id=folder.name,
        epoch=1,
        policy_version=version,
        pause_mode="in_place",
        backend="gloo",
        deadline_seconds=600,
        buckets={0: [TensorSpec("all", (1,), "float32")]},
        groups=(),
        folder=folder,
        is_adapter=True,
    )
    await receiver.begin(plan)
    await receiver.receive(folder.name, 0)
    await receiver.commit(folder.name, checksums)


if __name__ == "__main__":
    main()
