"""What published checkpoints have beside the model: FP8 blocks, and layers that predict further tokens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.ranks.rank_results import weights

_BLOCK = 16
_LARGEST = 448.0  # of float8_e4m3fn


def add_mtp_layer(folder: Path, name: str) -> None:
    """A layer that predicts further tokens, in a file of its own that the index names."""
    torch.manual_seed(0)
    layer = {
        f"{name}.eh_proj.weight": torch.randn(64, 128),
        f"{name}.enorm.weight": torch.randn(64),
        f"{name}.mlp.experts.0.up_proj.weight": torch.randn(48, 64),
    }
    save_file(layer, folder / "mtp.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(layer, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stack_experts(folder: Path) -> None:
    """The experts of each layer in two tensors, as Qwen3.5 is published."""
    found = weights(folder)
    stacks: dict[str, list[Tensor]] = {}
    for name in sorted(found, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(gate|down)_proj\.weight", name):
            experts, kind = match.groups()
            down = kind == "down"
            whole = found[name] if down else torch.cat([found[name], found[name.replace("gate_proj", "up_proj")]])
            stacks.setdefault(f"{experts}.{'down' if down else 'gate_up'}_proj", []).append(whole)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    plain = {name: weight for name, weight in found.items() if not re.search(r"\.experts\.\d+\.", name)}
    save_file(plain | {name: torch.stack(parts) for name, parts in stacks.items()}, folder / "model.safetensors")


def make_fp8(plain: Path, folder: Path) -> Path:
    """The model with its projections in FP8 blocks, each with a factor; answers a float32 folder of the same values."""
    quantized: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, weight in weights(plain).items():
        is_projection = "_proj" in name and weight.ndim == 2
        quantized |= _in_blocks(name, weight) if is_projection else {name: weight}
        exact[name] = _multiplied_out(quantized, name) if is_projection else weight
    config = json.loads((plain / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    _write(folder, plain, config | {"quantization_config": blocks}, quantized)
    _write(folder.with_name(f"{folder.name}-exact"), plain, config, exact)
    return folder.with_name(f"{folder.name}-exact")


def _in_blocks(name: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    scales, values = torch.zeros(rows, columns), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * _BLOCK, (row + 1) * _BLOCK), slice(column * _BLOCK, (column + 1) * _BLOCK)
            scales[row, column] = weight[place].abs().max() / _LARGEST
            values[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}


def _multiplied_out(quantized: Mapping[str, Tensor], name: str) -> Tensor:
    weight, scales = quantized[name].float(), quantized[f"{name}_scale_inv"]
    for row, column in torch.cartesian_prod(*(torch.arange(size) for size in weight.shape)).tolist():
        weight[row, column] *= scales[row // _BLOCK, column // _BLOCK]
    return weight


def _write(folder: Path, plain: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    for file in plain.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
