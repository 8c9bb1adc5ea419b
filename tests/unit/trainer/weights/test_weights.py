"""Buckets, checksums and the collective group, with a peer that is built as SGLang builds its side."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.publication import TensorSpec
from services.trainer.weights.buckets import split_into_buckets
from services.trainer.weights.engine_layout import DeviceHash, EngineChecksums
from services.trainer.weights.weight_group import unreached


def test_what_an_engine_fuses_in_one_call_is_in_one_bucket() -> None:
    names = [f"model.layers.0.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")]
    buckets = split_into_buckets([TensorSpec(name, (10,), "float32") for name in names], bucket_bytes=50)
    assert [[spec.name for spec in bucket] for bucket in buckets] == [names[:2], names[2:]]


@pytest.mark.parametrize("decoder", ["model", "model.language_model"])  # the second is beside a vision tower
def test_fused_parts_hash_as_the_fused_tensor(decoder: str) -> None:
    q, k, v = torch.randn(8, 4), torch.randn(2, 4), torch.randn(2, 4)
    checksums = EngineChecksums()
    checksums.update(
        (f"{decoder}.layers.0.self_attn.{n}_proj.weight", t) for n, t in zip("qkv", (q, k, v), strict=True)
    )
    fused = torch.cat([q, k, v])
    expected = hashlib.sha256(fused.numpy().tobytes()).hexdigest()[:16]
    assert checksums.result() == {"model.layers.0.self_attn.qkv_proj.weight": expected}


def test_experts_hash_as_the_two_tensors_that_an_engine_stacks_them_into() -> None:
    experts = [[torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)] for _ in range(3)]
    checksums = EngineChecksums()
    for number, parts in enumerate(experts):
        names = [f"model.layers.1.mlp.experts.{number}.{part}_proj.weight" for part in ("gate", "up", "down")]
        checksums.update(zip(names, parts, strict=True))
    w13 = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
    w2 = torch.stack([down for _, _, down in experts])
    assert checksums.result() == {
        f"model.layers.1.mlp.experts.{name}_weight": hashlib.sha256(stacked.numpy().tobytes()).hexdigest()[:16]
        for name, stacked in (("w13", w13), ("w2", w2))
    }


def test_an_engine_that_says_it_is_at_loopback_is_named_with_the_way_out() -> None:
    refused = RuntimeError("Gloo connectFullMesh failed: SO_ERROR: Connection refused, remote=[127.0.0.1]:5014")
    assert "start it with GLOO_SOCKET_IFNAME=INTERFACE" in str(unreached("weights", "10.77.0.4", refused))
    assert unreached("weights", "127.0.0.1", refused) is refused
    other = RuntimeError("Connection closed by peer [10.77.0.2]:5014")
    assert unreached("weights", "10.77.0.4", other) is other


KERNEL = Path(__file__).parents[3] / "support" / "fakes" / "interpreted_hash.py"
SIZES = [0, 1, 3, 4, 20, 42, 32_767, 32_768, 32_769, 100_002, 8192 * 4 * 3 + 8]


def patterned(num_bytes: int) -> torch.Tensor:
    """Bytes that say where they are."""
    places = torch.arange(num_bytes, dtype=torch.int64)
    return ((places * 2654435761 >> 7) ^ places).to(torch.uint8)


def hashed(*parts: torch.Tensor) -> str:
    found = DeviceHash(torch.device("cpu"))
    for part in parts:
        found.update(part)
    return found.hexdigest()


def test_it_is_what_the_kernel_of_the_engine_computes() -> None:
    ran = subprocess.run(
        [sys.executable, str(KERNEL), *map(str, SIZES)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    assert json.loads(ran.stdout.splitlines()[-1]) == {str(size): hashed(patterned(size)) for size in SIZES}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40_000), max_size=4))
def test_it_does_not_depend_on_how_bytes_are_divided(sizes: list[int]) -> None:
    whole = patterned(sum(sizes))
    assert hashed(*whole.split(sizes) if sizes else ()) == hashed(whole)


def test_bytes_may_begin_anywhere_in_memory() -> None:
    data = patterned(1001)
    assert hashed(data[1:]) == hashed(data[1:].clone())
