"""A complete Hugging Face folder, from the ranks' weights or another folder: safetensors, config.json, tokenizer.

Every pipeline stage writes the files of its own layers at the same time. The folder appears under its name at the end,
when all that is in it survives a power loss. What fails on one rank is raised on all (`agreement`); the tensors are
gathered to the end all the same, so that no rank is left in a collective.

Layers that are not trained are exported as they came: those that predict further tokens, a vision tower.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from headrace.disk import sync
from headrace.errors import AlreadyExists, HeadraceError, InvalidArgument
from headrace.models.folders import is_torn
from headrace.models.registry import read_architecture
from headrace.publication import TensorSpec
from headrace.rpc.log import log
from services.trainer.collective_io import CollectiveIO, write_tensors
from services.trainer.durable import make_folder, new_folder, put_in_place, remove, sync_files
from services.trainer.hugging_face.hf_folder import INDEX, HfFolder, passthrough_names
from services.trainer.megatron.parallel import Layout
from services.trainer.weights.buckets import split_into_buckets

Part = tuple[Mapping[str, str], int]
"""The file of each tensor, and the bytes of all."""


def write_passthrough_layers(
    hf_checkpoint: Path, draft: Path, dtype: str, file_bytes: int, *, is_quantized: bool
) -> Part:
    """Copies them from the checkpoint into files of their own; returns their part of the index.

    Matrices are in `dtype`. With `is_quantized` all are as the checkpoint stores them: engines take their drafts from
    these files.
    """
    source = HfFolder(hf_checkpoint)
    names = passthrough_names(source.names, read_architecture(hf_checkpoint))
    kept = [TensorSpec(name, source.shape(name), "float32") for name in names]
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, specs in enumerate(split_into_buckets(kept, file_bytes)):
        file = f"model-kept-{number + 1:05d}.safetensors"
        if is_quantized:
            content = {name: tensor for spec in specs for name, tensor in source.stored(spec.name).items()}
        else:
            content = {spec.name: _as(source.tensor(spec.name), dtype) for spec in specs}
        write_tensors(draft / file, content, {"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
        num_bytes += sum(tensor.nbytes for tensor in content.values())
    return weight_map, num_bytes


def _as(tensor: Tensor, dtype: str) -> Tensor:
    """Matrices may have been FP8; norms and router biases stay as they are."""
    return tensor.to(getattr(torch, dtype)) if tensor.ndim > 1 else tensor


FILE_BYTES = 4 << 30
Look = Callable[[Mapping[str, Tensor]], None]
"""Is shown the content of a file, by name."""
Write = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes a safetensors file. The tensors may be the model's own, on its device."""
_SINGLE = "model.safetensors"
_FIRST = "model-00001-of-00001.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_QUANTIZED = ("float8_e4m3fn", "int32")
_DRAFT = ".draft"
_TORN = ".torn"


def export(
    tensors: Iterator[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    hf_checkpoint: Path,
    folder: Path,
    layout: Layout,
    file_bytes: int = FILE_BYTES,
    look: Look = lambda content: None,
    write: Write | None = None,
) -> None:
    """Writes the model to the folder. Collective over all ranks; `tensors` yields this stage's `specs`, on its sender.

    `look` is called on each sender with the content of a file before it is written; what it raises ends the export.
    Raises AlreadyExists unless the folder is absent, empty, or an export that was torn; InvalidArgument when it cannot
    be written.
    """
    is_first = layout.rank == 0
    work = CollectiveIO(_get_default_group(), layout.device, InvalidArgument)
    draft = folder.parent / f".{folder.name}{_DRAFT}"
    work.do(lambda: _begin(folder, draft) if is_first else None)
    files = split_into_buckets(specs, file_bytes)
    names, part = _file_names(len(files), layout), ""
    if layout.tp_rank == 0 and layout.dp_rank == 0:
        part = _write_stage(work, tensors, files, names, draft, look, write or _write_file)
    with suppress(HeadraceError):  # nothing is left on a rank that writes, unless it has failed already
        for _ in tensors:  # the other tensor ranks only take part in the gathering
            pass
    try:
        work.agree()
        parts = [json.loads(each) for each in work.gather(part) if each]
        work.do(lambda: _finish(hf_checkpoint, draft, folder, specs, file_bytes, parts) if is_first else None)
    except HeadraceError:
        if is_first:
            remove(draft)  # a full disk is not kept full
        raise


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not is_torn(folder):
        raise AlreadyExists(f"{folder} exists already and is not empty: export to another folder")


def _begin(folder: Path, draft: Path) -> None:
    """An earlier export may have left the draft."""
    _require_free(folder)
    remove(draft)
    make_folder(draft.parent)
    draft.mkdir()


def _finish(
    hf_checkpoint: Path, draft: Path, folder: Path, specs: Sequence[TensorSpec], file_bytes: int, parts: Sequence[Part]
) -> None:
    """Runs on rank 0 when every stage's files are durable."""
    dtype = next(spec.dtype for spec in specs if spec.dtype not in _QUANTIZED)
    copy_companions(hf_checkpoint, draft)
    is_quantized = any(spec.dtype in _QUANTIZED for spec in specs)
    _write_config(hf_checkpoint, draft, dtype, is_quantized=is_quantized)
    kept = write_passthrough_layers(hf_checkpoint, draft, dtype, file_bytes, is_quantized=is_quantized)
    _write_index(draft, [*parts, kept])
    sync_files(draft)
    if folder.exists():
        _make_way(folder)
    put_in_place(draft, folder)


def _make_way(folder: Path) -> None:
    _require_free(folder)
    if not any(folder.iterdir()):
        folder.rmdir()
        return
    torn = folder.with_name(f".{folder.name}{_TORN}")
    remove(torn)
    folder.rename(torn)
    log.warning("torn_export_replaced", folder=str(folder), kept_as=str(torn))


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
    work: CollectiveIO,
    tensors: Iterator[tuple[str, Tensor]],
    files: Sequence[Sequence[TensorSpec]],
    names: Sequence[str],
    draft: Path,
    look: Look,
    write: Write,
) -> str:
    """Returns what the index says of this stage, as JSON."""
    weight_map: dict[str, str] = {}
    for name, specs in zip(names, files, strict=True):
        content = work.attempt(partial(_next, tensors, len(specs))) or {}
        work.attempt(partial(look, content))
        work.attempt(partial(write, draft / name, content))
        weight_map |= dict.fromkeys(content, name)
    num_bytes = sum(spec.num_bytes for specs in files for spec in specs)
    return json.dumps((weight_map, num_bytes))


def _next(tensors: Iterator[tuple[str, Tensor]], number: int) -> dict[str, Tensor]:
    return dict(islice(tensors, number))


def _write_file(path: Path, content: Mapping[str, Tensor]) -> None:
    copies = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in content.items()}
    write_tensors(path, copies, {"format": "pt"})
    sync(path)


def copy_companions(hf_checkpoint: Path, draft: Path) -> None:
    """Tokenizer, chat template, generation config, licence: all that is not weights."""
    for path in sorted(hf_checkpoint.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, draft / path.name)


def _write_config(hf_checkpoint: Path, draft: Path, dtype: str, *, is_quantized: bool) -> None:
    """The checkpoint's config, saying the dtype that was written; `torch_dtype` is what older readers look for."""
    config = json.loads((hf_checkpoint / "config.json").read_text())
    config |= {"dtype": dtype, "torch_dtype": dtype}
    if not is_quantized:
        config.pop("quantization_config", None)
    (draft / "config.json").write_text(json.dumps(config, indent=2))


def _write_index(draft: Path, parts: Sequence[Part]) -> None:
    weight_map = {name: file for files, _ in parts for name, file in files.items()}
    if _SINGLE in weight_map.values() and set(weight_map.values()) != {_SINGLE}:
        (draft / _SINGLE).rename(draft / _FIRST)  # transformers would read that file alone
        weight_map = {name: _FIRST if file == _SINGLE else file for name, file in weight_map.items()}
    if set(weight_map.values()) != {_SINGLE}:
        total_size = sum(num_bytes for _, num_bytes in parts)
        (draft / _INDEX).write_text(
            json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2)
        )


Named = tuple[str, Tensor]


def rewrite(
    source: HfFolder,
    folder: Path,
    transform: Callable[[Iterator[Named]], Iterator[Named]],
    quantization: Mapping[str, object] | None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes `transform` of the source's weights, a file at a time, and all else of it as it is.

    `quantization` is what config.json will say of the form; None for plain weights. Raises AlreadyExists.
    """
    specs = [TensorSpec(name, source.shape(name), "float32") for name in sorted(source.names)]
    with new_folder(folder) as draft:
        weight_map: dict[str, str] = {}
        for number, part in enumerate(split_into_buckets(specs, file_bytes)):
            file = f"model-{number + 1:05d}.safetensors"
            content = dict(transform((spec.name, source.tensor(spec.name).contiguous()) for spec in part))
            write_tensors(draft / file, content, {"format": "pt"})
            weight_map |= dict.fromkeys(content, file)
        copy_companions(source.folder, draft)
        config = json.loads((source.folder / "config.json").read_text())
        config.pop("quantization_config", None)
        if quantization:
            config["quantization_config"] = quantization
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        (draft / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
