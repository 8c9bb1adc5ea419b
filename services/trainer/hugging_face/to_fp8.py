"""`python -m services.trainer.hugging_face.to_fp8 MODEL FOLDER`: a Hugging Face folder in block FP8, for engines.

Projections become float8_e4m3fn with a float32 factor for each block of 128 × 128; embeddings, norms, routers and the
output layer stay as they are. A job whose hf_checkpoint is such a folder trains in bfloat16 or float32, as ever, and
gives its engines new weights in FP8.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.errors import AlreadyExists, HeadraceError
from headrace.models.block_fp8 import BlockFp8
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.files.durable import make_folder, put_in_place, remove, sync_files
from services.trainer.hugging_face.export import copy_companions
from services.trainer.hugging_face.hf_folder import INDEX, HfFolder
from services.trainer.weights.block_fp8 import can_be_quantized, quantized
from services.trainer.weights.buckets import cut

_BLOCK = (128, 128)
_FILE_BYTES = 4 << 30
_PROJECTION = re.compile(r"(?<!\beh)_proj(_with_mqa)?\.weight$")


def to_fp8(model: Path, folder: Path, file_bytes: int = _FILE_BYTES) -> BlockFp8:
    """Writes the folder, one file after the other. Raises AlreadyExists, and what reading the model raises."""
    if folder.exists():
        raise AlreadyExists(f"{folder} exists already: name a new folder")
    source = HfFolder(model)
    shapes = {name: source.shape(name) for name in sorted(source.names)}
    every = BlockFp8(frozenset(filter(_PROJECTION.search, shapes)), _BLOCK, len(shapes))
    projections = frozenset(name for name in every.weights if can_be_quantized(every, shapes[name]))
    form = replace(every, weights=projections)
    draft = folder.parent / f".{folder.name}.draft"
    remove(draft)
    make_folder(draft)
    weight_map: dict[str, str] = {}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    for number, part in enumerate(cut(specs, file_bytes)):
        file = f"model-{number + 1:05d}.safetensors"
        content = dict(quantized(form, ((spec.name, source.tensor(spec.name).contiguous()) for spec in part)))
        save_file(content, str(draft / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
    copy_companions(model, draft)
    _write_config(model, draft, sorted(shapes.keys() - projections))
    (draft / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    sync_files(draft)
    put_in_place(draft, folder)
    return form


def _write_config(model: Path, draft: Path, kept: list[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(_BLOCK),
        "modules_to_not_convert": sorted({name.removesuffix(".weight") for name in kept if name.endswith(".weight")}),
    }
    (draft / "config.json").write_text(json.dumps(config, indent=2))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.hugging_face.to_fp8", description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder in bfloat16 or float32")
    parser.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    given = parser.parse_args()
    try:
        with torch.no_grad():
            form = to_fp8(given.model, given.folder)
    except HeadraceError as error:
        print(f"to_fp8: {error.message}", file=sys.stderr)  # noqa: T201  # one line to a person
        return 2
    print(f"{given.folder}: {len(form.weights)} of {form.num_tensors} tensors in FP8")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
