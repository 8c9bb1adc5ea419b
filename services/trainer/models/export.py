"""A complete Hugging Face folder from the ranks' weights: safetensors, config.json, tokenizer.

Every pipeline stage writes the files of its own layers at the same time. The folder appears under its name at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import AlreadyExists
from services.trainer.buckets import TensorSpec, cut
from services.trainer.models.kept_layers import write_kept_layers
from services.trainer.parallel import Layout

FILE_BYTES = 4 << 30
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_PART = ".part"


def export(
    tensors: Iterator[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    hf_checkpoint: Path,
    folder: Path,
    layout: Layout,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Collective over all ranks; `tensors` yields this stage's `specs`, on its sender. Raises AlreadyExists unless the
    folder is absent or empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} is there already and not empty: export to another folder")
    draft = folder.parent / f".{folder.name}.draft"
    dist.barrier()  # all ranks have looked at the folder before any of them writes
    if layout.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    files = cut(specs, file_bytes)
    names = _file_names(len(files), layout)  # a collective: the draft is there for all behind it
    if layout.tp_rank == 0 and layout.dp_rank == 0:
        _write_stage(tensors, files, names, draft, layout.pp_rank)
    for _ in tensors:  # the other tensor ranks only take part in the gathering
        pass
    dist.barrier()
    if layout.rank == 0:
        _copy_companions(hf_checkpoint, draft)
        _write_config(hf_checkpoint, draft, specs[0].dtype)
        write_kept_layers(hf_checkpoint, draft, specs[0].dtype, file_bytes, draft / f"{layout.pp_size}{_PART}")
        _write_index(draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    dist.barrier()


def _file_names(num_files: int, layout: Layout) -> list[str]:
    """This stage's file names; their numbers go on from the stages before."""
    counts = torch.zeros(layout.pp_size, dtype=torch.int64, device=layout.device)
    if layout.tp_rank == 0 and layout.dp_rank == 0:
        counts[layout.pp_rank] = num_files
    dist.all_reduce(counts)
    total, before = int(counts.sum()), int(counts[: layout.pp_rank].sum())
    if total == 1:
        return [_SINGLE]
    return [f"model-{before + place + 1:05d}-of-{total:05d}.safetensors" for place in range(num_files)]


def _write_stage(
    tensors: Iterator[tuple[str, Tensor]],
    files: Sequence[Sequence[TensorSpec]],
    names: Sequence[str],
    draft: Path,
    stage: int,
) -> None:
    weight_map: dict[str, str] = {}
    for name, specs in zip(names, files, strict=True):
        content = {key: tensor.cpu().clone() for key, tensor in islice(tensors, len(specs))}
        save_file(content, str(draft / name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, name)
    num_bytes = sum(spec.num_bytes for specs in files for spec in specs)
    (draft / f"{stage}{_PART}").write_text(json.dumps({"weight_map": weight_map, "num_bytes": num_bytes}))


def _copy_companions(hf_checkpoint: Path, draft: Path) -> None:
    """Tokenizer, chat template, generation config, licence: all that is not weights."""
    for path in sorted(hf_checkpoint.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, draft / path.name)


def _write_config(hf_checkpoint: Path, draft: Path, dtype: str) -> None:
    """The checkpoint's config, saying the dtype that was written; `torch_dtype` is what older readers look for."""
    config = json.loads((hf_checkpoint / "config.json").read_text())
    config |= {"dtype": dtype, "torch_dtype": dtype}
    config.pop("quantization_config", None)
    (draft / "config.json").write_text(json.dumps(config, indent=2))


def _write_index(draft: Path) -> None:
    parts = sorted(draft.glob(f"*{_PART}"), key=lambda path: int(path.stem))
    contents = [json.loads(part.read_text()) for part in parts]
    weight_map = {name: file for content in contents for name, file in content["weight_map"].items()}
    if set(weight_map.values()) != {_SINGLE}:
        total_size = sum(content["num_bytes"] for content in contents)
        (draft / _INDEX).write_text(
            json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2)
        )
    for part in parts:
        part.unlink()
