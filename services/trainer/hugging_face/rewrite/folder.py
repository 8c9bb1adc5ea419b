"""A Hugging Face folder written again with its weights in another form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from headrace.errors import AlreadyExists
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.files.durable import make_folder, put_in_place, remove, sync_files
from services.trainer.files.tensor_file import write_tensors
from services.trainer.hugging_face.export import FILE_BYTES, copy_companions
from services.trainer.hugging_face.hf_folder import INDEX, HfFolder
from services.trainer.weights.buckets import cut

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
    if folder.exists():
        raise AlreadyExists(f"{folder} exists already: name a new folder")
    draft = folder.parent / f".{folder.name}.draft"
    remove(draft)
    make_folder(draft)
    weight_map: dict[str, str] = {}
    specs = [TensorSpec(name, source.shape(name), "float32") for name in sorted(source.names)]
    for number, part in enumerate(cut(specs, file_bytes)):
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
    sync_files(draft)
    put_in_place(draft, folder)
