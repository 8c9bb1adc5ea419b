"""Bytes of a publication of what changed alone, beside the whole: `python -m tests.bench.weights.delta BEFORE AFTER`.

Both are Hugging Face folders, as `services.trainer.export_checkpoint` writes them of two checkpoints of a run, and are
taken in bfloat16, as engines on GPUs are given them. Said are the share of values whose bits differ, and the bytes of
two exact forms: each changed value behind its distance from the one before, and the bits' differences under zlib.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

_LEVEL = 1
_VALUE_BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    for line in rows(args.before, args.after):
        print(line)


def rows(before: Path, after: Path) -> list[str]:
    """The table; the whole is the baseline of each row. Raises KeyError for folders of different models."""
    whole = changed = listed = squeezed = 0
    old = dict(_tensors(before))
    for name, tensor in _tensors(after):
        difference = (old.pop(name) ^ tensor).flatten()
        places = difference.nonzero().flatten()
        whole += tensor.numel() * _VALUE_BYTES
        changed += places.numel()
        listed += _listed_bytes(places)
        squeezed += len(zlib.compress(difference.numpy().tobytes(), _LEVEL))
    if old:
        raise KeyError(f"{after} lacks {next(iter(old))}")
    forms = (("whole", whole), ("values and distances", listed), (f"differences under zlib -{_LEVEL}", squeezed))
    return [
        f"{100 * changed * _VALUE_BYTES / whole:.3f} % of {whole // _VALUE_BYTES:,} values changed",
        *(f"{name:<28} {size / 1e6:10.2f} MB  {size / whole:7.4f}x of the whole" for name, size in forms),
    ]


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor's bits, int16."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name).to(torch.bfloat16).view(torch.int16)


def _listed_bytes(places: torch.Tensor) -> int:
    """Seven bits of a distance in a byte."""
    distances = places.diff(prepend=torch.tensor([-1]))
    return int(sum((distances >= 1 << bits).sum() for bits in (0, 7, 14, 21, 28))) + _VALUE_BYTES * places.numel()


if __name__ == "__main__":
    main()
