"""A publication's bytes and checksums, over the collective of the devices: NCCL between two GPUs, gloo on a CPU.

The receiver joins as SGLang does, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from headrace.publication import TensorSpec
from services.trainer.control.senders import WeightSender
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from services.trainer.weights.engine_layout import EngineChecksums
from tests.gpu.devices import NO_GPU, Figure

pytestmark = pytest.mark.timeout(300)

SECONDS = 120.0
ROOT = Path(__file__).parents[2]
WAYS = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins no two processes of one GPU"),
        ],
    ),
]


class Weights:
    """Matrices of one layer after the other: 8 MB on a CPU, 2 GB on a GPU."""

    def __init__(self, device: str) -> None:
        rows = 1024 if device == "cpu" else 65536
        generator = torch.Generator(device).manual_seed(1)
        self.named = {
            f"model.layers.{layer}.mlp.{name}_proj.weight": torch.randn(
                rows, 256, device=device, generator=generator
            ).bfloat16()
            for layer in range(8)
            for name in ("gate", "up")
        }

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named.items()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), "bfloat16") for name, tensor in self.named.items()]


@pytest.mark.parametrize("device", WAYS)
def test_what_another_process_receives_has_the_senders_checksums(device: str, tmp_path: Path, figure: Figure) -> None:
    weights = Weights(device)
    layout = SimpleNamespace(device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    layout.pp_rank = layout.tp_rank = layout.dp_rank = 0
    sender = WeightSender(
        cast(Policy, weights), cast(Layout, layout), lambda _: False,
        host="127.0.0.1", bucket_bytes=64 << 20, timeout_seconds=SECONDS,
    )  # fmt: skip
    opened, stage = sender.open(0), sender.describe()
    assert opened is not None
    assert stage is not None
    asked = {
        "device": device, "host": opened.host, "port": opened.port, "name": opened.name,
        "buckets": [[[spec.name, list(spec.shape)] for spec in bucket] for bucket in stage.buckets],
    }  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    receiver = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.test_publication", str(tmp_path)],
        cwd=ROOT,
    )  # fmt: skip
    try:
        sent = sender.send("first", {0: 2})
        started = time.monotonic()
        again = sender.send("second", {0: 2})
        seconds = time.monotonic() - started
        assert receiver.wait(SECONDS) == 0
    finally:
        receiver.kill()
        receiver.wait()
        sender.drop([0])
    assert sent is not None
    assert again is not None
    assert sent.error is None
    assert sent.checksums == again.checksums == json.loads((tmp_path / "received.json").read_text())
    num_bytes = sum(tensor.numel() * 2 for tensor in weights.named.values())
    figure(
        f"a publication of {num_bytes / 1e9:.2f} GB between two processes, {device}",
        f"sent and hashed in {seconds:.2f} s",
        f"{num_bytes / 1e9 / seconds:.1f} GB/s",
    )


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 127, 100_000])
def test_the_checksum_of_a_cuda_tensor_is_the_engines(dtype: torch.dtype, rows: int) -> None:
    kernel = pytest.importorskip("sglang.kernels.ops.memory.gpu_tensor_hash")
    parts = {f"l.0.mlp.{name}_proj.weight": torch.randn(rows, 576, device="cuda").to(dtype) for name in ("gate", "up")}
    sums = EngineChecksums()
    sums.update(parts.items())
    fused = torch.cat(list(parts.values()))
    assert sums.result() == {"l.0.mlp.gate_up_proj.weight": f"{kernel.gpu_tensor_hash(fused):016x}"}


def receive(folder: Path) -> None:
    """Two publications, as an engine joins and takes them; writes the second's checksums."""
    asked = json.loads((folder / "asked.json").read_text())
    device = torch.device("cuda", 1) if asked["device"] == "cuda" else torch.device("cpu")
    store = dist.TCPStore(asked["host"], asked["port"], 2, False, timedelta(seconds=SECONDS))
    named = dist.PrefixStore(f"{asked['name']}/", dist.PrefixStore(asked["name"], store))
    group = _group(device, dist.PrefixStore(f"{device.type}/", named))
    checksums = EngineChecksums()
    for publication in range(2):
        for bucket in asked["buckets"]:
            sizes = [torch.Size(shape).numel() * 2 for _, shape in bucket]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            group.broadcast([flat], dist.BroadcastOptions()).wait()
            if publication == 1:
                parts = zip(bucket, flat.split(sizes), strict=True)
                checksums.update((name, part.view(torch.bfloat16).view(shape)) for (name, shape), part in parts)
    (folder / "received.json").write_text(json.dumps(checksums.result()))


def _group(device: torch.device, store: dist.Store) -> dist.ProcessGroup:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=SECONDS))
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=SECONDS)
    return dist.ProcessGroupNCCL(store, 1, 2, options)


if __name__ == "__main__":
    receive(Path(sys.argv[1]))
