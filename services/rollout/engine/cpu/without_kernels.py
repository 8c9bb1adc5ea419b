"""Operations of torch for what SGLang's models leave to kernels of a GPU, chosen through SGLang's registries.

Latent attention (DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash) keeps latents in the cache, of which `torch_native`
attention makes no keys and values. SGLang would choose a prefill that needs them; absorbed, as it decodes, the queries
are turned to the latents instead. Qwen2-MoE's gate of the shared expert is a Triton kernel on every device.
"""

from __future__ import annotations

import sys
from typing import Any

_LATENTS = "sglang.srt.models.deepseek_common.attention_backend_handler"
_KERNELS = "sglang.kernels.ops.elementwise.elementwise"


def use_torch() -> None:
    """Called when the served model's module is imported: what that has not imported stays as it is."""
    if (handlers := sys.modules.get(_LATENTS)) is not None:
        handlers.AttentionBackendRegistry.register("torch_native", _absorbed)
    if "sglang.srt.models.qwen2_moe" in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{_KERNELS}.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE)
        HookRegistry.apply_hooks()


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    return sys.modules[_LATENTS].AttnForwardMethod.MLA


def add_gated(hidden: Any, gate_weight: Any, shared: Any, final: Any) -> None:
    """Adds the shared expert's output [T, H], times its sigmoid gate, to `final` in place; gate_weight is [H]."""
    final.add_((hidden @ gate_weight).sigmoid()[:, None] * shared)
