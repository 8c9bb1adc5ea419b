"""Adapters in the folder that peft reads and writes: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import AlreadyExists, ConfigError
from headrace.job.model.lora_targets import layer_name
from headrace.job.schema.lora import LoraSection
from headrace.models.rows import HfTensor
from services.trainer.files.durable import make_folder, put_in_place, remove, sync_files
from services.trainer.files.tensor_file import write_tensors
from services.trainer.model.lora.low_rank import Pair, pair_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LARGEST_CONFIG = 1 << 20
_SHOWN = 3
_OTHER_FORMS = (
    *("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("fan_in_fan_out", "layer_replication", "target_parameters", "lora_bias", "trainable_token_indices"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "velora_config"),
)
"""Settings of peft that change what an adapter is; here all of them are off."""
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ change them."""


class PeftFolder:
    """Adapters of the job's rank and layers. Raises ConfigError for any others."""

    def __init__(self, folder: Path, lora: LoraSection, targets: Iterable[HfTensor]) -> None:
        self._folder = folder
        self._rank = lora.lora_rank
        config = self._config()
        self._require(config, "peft_type", "LORA", "")
        self._require(config, "bias", "none", "")
        self._require(config, "r", lora.lora_rank, ": pass --lora-rank")
        self._require(config, "lora_alpha", lora.lora_alpha, ": pass --lora-alpha")
        for name in _OTHER_FORMS:
            if config.get(name):
                raise ConfigError(f"lora_load {folder}: {name} is set in {CONFIG}: headrace has plain LoRA alone")
        if (initial := config.get("init_lora_weights")) not in _INITIAL_WEIGHTS:
            raise ConfigError(
                f"lora_load {folder}: init_lora_weights is {initial!r} in {CONFIG}, so the adapter belongs to a base "
                "that peft has changed: convert it to plain LoRA first (path_initial_model_for_weight_conversion of "
                "peft's save_pretrained)",
                field="lora_load",
            )
        self._require_names({name for tensor in targets for name in peft_names(tensor.name)})

    def __call__(self, weight: HfTensor) -> Pair:
        """The matrices of the layer that has this weight."""
        assert self._rank is not None
        shapes = pair_shapes(weight, self._rank)
        with self._opened() as file:
            a, b = (file.get_tensor(name) for name in peft_names(weight.name))
        for name, tensor, shape in zip(peft_names(weight.name), (a, b), shapes, strict=True):
            if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ConfigError(
                    f"lora_load {self._folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, and must be "
                    f"finite numbers of shape {list(shape)}",
                    field="lora_load",
                )
        return Pair(a.float(), b.float())

    def _config(self) -> Mapping[str, Any]:
        path = self._folder / CONFIG
        try:
            if path.stat().st_size > _LARGEST_CONFIG:
                raise ValueError("it is too large")
            found = json.loads(path.read_text())
            if not isinstance(found, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"lora_load {path} cannot be read: {error}", field="lora_load") from error
        return found

    def _require(self, config: Mapping[str, Any], name: str, wanted: object, way_out: str) -> None:
        if config.get(name) != wanted:
            raise ConfigError(
                f"lora_load {self._folder}: {name} is {config.get(name)} there and {wanted} here{way_out}",
                field="lora_load",
            )

    def _require_names(self, expected: set[str]) -> None:
        with self._opened() as file:
            found = set(file.keys())
        lacking, extra = sorted(expected - found), sorted(found - expected)
        if lacking or extra:
            raise ConfigError(
                f"lora_load {self._folder} has adapters of other layers: it lacks {len(lacking)} ({lacking[:_SHOWN]}) "
                f"and has {len(extra)} more ({extra[:_SHOWN]}): pass its --lora-target-modules",
                field="lora_load",
            )

    def _opened(self) -> Any:
        try:
            return safe_open(str(self._folder / WEIGHTS), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"lora_load {self._folder / WEIGHTS} cannot be read: {error}", field="lora_load"
            ) from error


def peft_names(weight: str) -> tuple[str, str]:
    """Returns the names that A and B have in peft's file."""
    layer = _PREFIX + layer_name(weight)
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def write_peft(
    folder: Path, base: Path, lora: LoraSection, targets: Iterable[str], matrices: Mapping[str, Tensor]
) -> None:
    """Writes whole matrices, by their keys in a checkpoint. Raises AlreadyExists for a folder in use."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} exists already and is not empty: export to another folder")
    draft = folder.parent / f".{folder.name}.draft"
    remove(draft)
    make_folder(draft)
    tensors = {_PREFIX + key: tensor.detach().cpu().contiguous() for key, tensor in matrices.items()}
    write_tensors(draft / WEIGHTS, tensors, {"format": "pt"})
    (draft / CONFIG).write_text(json.dumps(_peft_config(base, lora, targets), indent=2))
    sync_files(draft)
    if folder.exists():
        folder.rmdir()
    put_in_place(draft, folder)


def _peft_config(base: Path, lora: LoraSection, targets: Iterable[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
