"""`python -m services.trainer.hugging_face.rewrite.to_plain MODEL FOLDER`: a quantized Hugging Face folder in bfloat16.

Block FP8, packed INT4 (Kimi K2 Thinking) and MXFP4 (gpt-oss) are multiplied out; norms and router biases stay as they
are. For models that are published in a form in which engines cannot be given new weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace.models.folders import main_of
from services.trainer.hugging_face.export import FILE_BYTES, Named, rewrite
from services.trainer.hugging_face.hf_folder import HfFolder


def to_plain(model: Path, folder: Path, file_bytes: int = FILE_BYTES) -> int:
    """Returns the number of tensors. Raises AlreadyExists, and what reading the model raises."""
    source = HfFolder(model)
    rewrite(source, folder, _plain, None, file_bytes)
    return len(source.names)


def _plain(weights: Iterator[Named]) -> Iterator[Named]:
    for name, weight in weights:
        yield name, weight.bfloat16() if weight.ndim > 1 else weight


def main() -> int:
    what = "a Hugging Face folder in block FP8, packed INT4 or MXFP4"
    return main_of("services.trainer.hugging_face.rewrite.to_plain", __doc__, what, _written)


def _written(model: Path, folder: Path) -> str:
    with torch.no_grad():
        return f"{to_plain(model, folder)} tensors in bfloat16"


if __name__ == "__main__":
    sys.exit(main())
