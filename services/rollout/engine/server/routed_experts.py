"""Has an engine say for every request which experts its tokens were routed to, whether or not the request asks.

sglang-router sends on the fields of a request that it knows, and `return_routed_experts` is not among them. SGLang's
registry of hooks, which is made for plugins, is where the server reads the request as one that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"


def always_returned() -> None:
    """Called before the server starts, in its process, where every request is read."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NORMALIZE, _asked, HookType.AROUND)


def _asked(normalize: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    request.return_routed_experts = True
    return normalize(request, *args, **kwargs)
