"""SGLang's class for the checkpoint that is served, found without importing its models of all other architectures.

SGLang imports this from its registry of models. An architecture that is not found here it looks for among all of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from services.rollout.engine.cpu import CHECKPOINT
from services.rollout.engine.cpu.attention import BACKEND, decoded, extended

# Operations of torch for what SGLang's models leave to kernels of a GPU, chosen through SGLang's registries.
# Latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash) keeps latents in the cache, of which `torch_native`
# attention makes no keys and values. SGLang would choose a prefill that needs them; absorbed, as it decodes, the
# queries are turned to the latents instead. Without YaRN (Moonlight) it refuses to rotate them on a CPU; its plain
# rotation does. Qwen2-MoE's gate of the shared expert is a Triton kernel on every device, and so are MiniMax-M2's norms
# of queries and keys. A prefill engine would pin the memory of what it sends, and wait for CUDA's stream.

_LATENTS = "sglang.srt.models.deepseek_common.attention_backend_handler"
_ROTATIONS = "sglang.srt.layers.rotary_embedding.factory"
_TRANSFER = "sglang.srt.disaggregation.prefill"
_KERNELS = "sglang.kernels.ops.elementwise.elementwise"
_MINIMAX = "sglang.srt.models.minimax_m2"


def use_torch() -> None:
    """Called when the served model's module is imported: what that has not imported stays as it is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_decode", decoded, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_extend", extended, HookType.AROUND)
    if (handlers := sys.modules.get(_LATENTS)) is not None:
        handlers.AttentionBackendRegistry.register("torch_native", _absorbed)
        HookRegistry.register(f"{_ROTATIONS}.get_rope_cpu", _rotation, HookType.AROUND)
    if (transfer := sys.modules.get(_TRANSFER)) is not None:
        transfer.torch = _TorchOfCpus()  # type: ignore[attr-defined]
    if "sglang.srt.models.qwen2_moe" in sys.modules:
        HookRegistry.register(f"{_KERNELS}.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE)
    if _MINIMAX in sys.modules:
        HookRegistry.register(f"{_MINIMAX}.rms_sumsq_serial", squares_of, HookType.REPLACE)
        HookRegistry.register(f"{_MINIMAX}.rms_apply_serial", normed, HookType.REPLACE)
    HookRegistry.apply_hooks()


class _TorchOfCpus:
    """torch, without what its CUDA part is asked for."""

    cuda = SimpleNamespace(
        Event=lambda: SimpleNamespace(record=lambda _: None, synchronize=lambda: None), current_stream=lambda: None
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Any:
        return torch.empty(*sizes, **options)


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    return sys.modules[_LATENTS].AttnForwardMethod.MLA


def _rotation(stretched: Callable[..., Any], *sizes: Any) -> Any:
    """`sizes` end with scaling, dtype, part and device. Where nothing is scaled, the rotation is that of a GPU."""
    *_, scaling, _dtype, _part, _device = sizes
    return stretched(*sizes) if scaling is not None else sys.modules[_ROTATIONS].get_rope(*sizes[:-1])


def add_gated(hidden: Any, gate_weight: Any, shared: Any, final: Any) -> None:
    """Adds the shared expert's output [T, H], times its sigmoid gate, to `final` in place; gate_weight is [H]."""
    final.add_((hidden @ gate_weight).sigmoid()[:, None] * shared)


def squares_of(queries: Any, keys: Any) -> Any:
    """[2, T]: the sums of the squares of [T, H] queries and of keys. Tensor ranks sum them up."""
    sums = queries.new_empty(2, len(queries), dtype=sys.modules["torch"].float32)
    for row, values in zip(sums, (queries, keys), strict=True):
        row.copy_(values.float().square().sum(-1))
    return sums


def normed(
    queries: Any, keys: Any, query_weight: Any, key_weight: Any, sums: Any, ranks: int = 1, eps: float = 1e-5
) -> tuple[Any, Any]:
    """Queries and keys of this rank, each divided by the root of their mean square over all ranks."""

    def of(values: Any, weight: Any, squares: Any) -> Any:
        scale = (squares / (values.shape[1] * ranks) + eps).rsqrt()[:, None]
        return (values.float() * scale * weight.float()).to(values.dtype)

    return of(queries, query_weight, sums[0]), of(keys, key_weight, sums[1])


_PACKAGE = "sglang.srt.models"
_ENTRIES = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def served_models(checkpoint: Path) -> list[Any]:
    """The classes of the checkpoint's architectures; empty where SGLang has none by that name."""
    config = checkpoint / "config.json"
    names = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    return [found for name in names if (found := _model(name)) is not None]


def _model(name: str) -> Any:
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations or [] if spec else []
    for file in sorted(file for folder in folders for file in Path(folder).glob("*.py")):
        entries = _ENTRIES.search(file.read_text())
        if entries and re.search(rf"\b{re.escape(name)}\b", entries[1]):
            return getattr(import_module(f"{_PACKAGE}.{file.stem}"), name)
    return None


EntryClass = served_models(Path(os.environ.get(CHECKPOINT, "")))
if EntryClass:
    use_torch()
