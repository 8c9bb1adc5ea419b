"""The checksum that is computed on a device is the one that SGLang's own kernel computes.

On a CPU Triton interprets the kernel, in a process of its own: Triton looks at its switch when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.weights.engine_layout import DeviceHash

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
