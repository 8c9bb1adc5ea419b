"""`python -m services.trainer.hugging_face.rewrite.to_fp8 MODEL FOLDER`: a folder in block FP8, for engines.

Projections become float8_e4m3fn with a float32 factor for each block of 128 × 128; embeddings, norms, routers and the
output layer stay as they are. A job whose hf_checkpoint is such a folder trains in bfloat16 or float32, as ever, and
gives its engines new weights in FP8.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from headrace.models.folders import QuantizedForm, main_of
from headrace.models.registry import read_architecture
from services.trainer.hugging_face.export import FILE_BYTES, rewrite
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.weights.quantization import can_be_quantized, quantized

_BLOCK = (128, 128)
_PROJECTION = re.compile(r"((?<!\beh)_proj(_with_mqa)?|\.w[123])\.weight$")


def to_fp8(model: Path, folder: Path, file_bytes: int = FILE_BYTES) -> QuantizedForm:
    """Writes the folder, one file after the other. Raises AlreadyExists, and what reading the model raises."""
    source = HfFolder(model, read_architecture(model))
    shapes = {name: source.shape(name) for name in sorted(source.names)}
    every = QuantizedForm(frozenset(filter(_PROJECTION.search, shapes)), _BLOCK, len(shapes))
    projections = frozenset(name for name in every.weights if can_be_quantized(every, shapes[name]))
    form = replace(every, weights=projections)
    kept = sorted(shapes.keys() - projections)
    rewrite(source, folder, lambda part: quantized(form, part), _quantization(kept), file_bytes)
    return form


def _quantization(kept: list[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(_BLOCK),
        "modules_to_not_convert": sorted({name.removesuffix(".weight") for name in kept if name.endswith(".weight")}),
    }


def main() -> int:
    what = "a Hugging Face folder in bfloat16, float32 or packed INT4"
    return main_of("services.trainer.hugging_face.rewrite.to_fp8", __doc__, what, _written)


def _written(model: Path, folder: Path) -> str:
    with torch.no_grad():
        form = to_fp8(model, folder)
    return f"{len(form.weights)} of {form.num_tensors} tensors in FP8"


if __name__ == "__main__":
    sys.exit(main())
