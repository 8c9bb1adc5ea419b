"""`python -m services.trainer.hugging_face.rewrite.to_plain MODEL FOLDER`: a quantized Hugging Face folder in bfloat16.

Block FP8 and packed INT4 (Kimi K2 Thinking) are multiplied out; norms and router biases stay as they are. For models
that are published in a form in which engines cannot be given new weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace.errors import HeadraceError
from services.trainer.hugging_face.export import FILE_BYTES
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.hugging_face.rewrite.folder import Named, rewrite


def to_plain(model: Path, folder: Path, file_bytes: int = FILE_BYTES) -> int:
    """Returns the number of tensors. Raises AlreadyExists, and what reading the model raises."""
    source = HfFolder(model)
    rewrite(source, folder, _plain, None, file_bytes)
    return len(source.names)


def _plain(weights: Iterator[Named]) -> Iterator[Named]:
    for name, weight in weights:
        yield name, weight.bfloat16() if weight.ndim > 1 else weight


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.hugging_face.rewrite.to_plain", description=__doc__
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder in block FP8 or packed INT4")
    parser.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    given = parser.parse_args()
    try:
        with torch.no_grad():
            num_tensors = to_plain(given.model, given.folder)
    except HeadraceError as error:
        print(f"to_plain: {error.message}", file=sys.stderr)  # noqa: T201  # one line to a person
        return 2
    print(f"{given.folder}: {num_tensors} tensors in bfloat16")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
