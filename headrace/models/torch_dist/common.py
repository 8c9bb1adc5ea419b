"""The arguments of the Megatron that wrote a checkpoint (`common.pt`), compared with the model of this job.

Two models can have tensors of the same shapes: with other heads, another rotary base, other routing.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, is_same_setting
from headrace.models.torch_dist.folder import COMMON
from headrace.models.torch_dist.pickled import StandIn, read_pickle

_MAX_PICKLE_BYTES = 256 << 20
_PLAIN = {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple, "complex": StandIn}
_PACKAGES: tuple[str, ...] = (
    "argparse",
    "collections",
    "copyreg",
    "_codecs",
    "datetime",
    "enum",
    "functools",
    "megatron",
    "numpy",
)
_PACKAGES += ("pathlib", "sglang", "signal", "slime", "torch", "transformer_engine", "transformers", "types")
"""Arguments hold objects of these packages, which are read as stand-ins."""


def require_same_arguments(folder: Path, architecture: Architecture) -> None:
    """Raises ConfigError that names the arguments which contradict the architecture, as far as there are any."""
    there, here = arguments(folder / COMMON), facts(architecture)
    wrong = [
        f"{name} is {str(there[name])[:50]} there and {wanted} here"
        for name, wanted in here.items()
        if isinstance(there.get(name), int | float | str) and not is_same_setting(there[name], wanted)
    ]
    if wrong:
        raise ConfigError(
            f"{folder} is of another model: {', '.join(wrong)}: name a checkpoint of the model whose --hf-checkpoint "
            "this is"
        )


def arguments(path: Path) -> Mapping[str, Any]:
    """Megatron's arguments by name, none where the file has none. Raises ConfigError for another kind of file."""
    try:
        with zipfile.ZipFile(path) as file:
            [member] = [each for each in file.infolist() if each.filename.endswith("/data.pkl")]
            if member.file_size > _MAX_PICKLE_BYTES:
                raise ConfigError(f"{path} has a pickle of {member.file_size} bytes: {_MAX_PICKLE_BYTES} are read")
            content = file.read(member)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ConfigError(f"{path} is not a file of torch.save: {str(error)[:200]}: copy it again") from error
    found = read_pickle(io.BytesIO(content), path, _resolve)
    args = found.get("args") if isinstance(found, dict) else None
    state = args.state if isinstance(args, StandIn) else None
    return state if isinstance(state, dict) else {}


def _resolve(module: str, name: str) -> Any:
    if module in ("builtins", "__builtin__"):
        return _PLAIN.get(name)
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    return type(name, (StandIn,), {}) if module.partition(".")[0] in _PACKAGES else None


def facts(a: Architecture) -> dict[str, Any]:
    """The arguments that Megatron has of every model; `argparse` leaves None where nothing was said."""
    found: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "norm_epsilon": a.norm_epsilon,
        "rotary_base": a.rotary_base,
        "rotary_percent": a.rotary_percent,
    }
    if a.latent_attention is None:
        found["kv_channels"] = a.kv_channels
    if a.experts:
        found |= {"num_experts": a.experts.count, "moe_router_topk": a.experts.topk}
        found |= {"moe_router_score_function": a.experts.score_function}
    return found
