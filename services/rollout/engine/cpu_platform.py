"""SGLang on a CPU without AMX: the platform class that SGLang loads by entry point where there is no accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def activate() -> str | None:
    """Returns the platform's dotted name, or None where SGLang shall choose: with an accelerator or its CPU engine."""
    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    _without_pinned_memory()
    return f"{__name__}.PlainCpuPlatform"


def _without_pinned_memory() -> None:
    """SGLang's adapters ask for pinned memory, which torch has beside an accelerator only."""

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Uses torch's own kernels only: SGLang's `cpu` platform would load the AMX kernels of sgl_kernel."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
