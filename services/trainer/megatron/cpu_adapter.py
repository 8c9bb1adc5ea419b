"""Megatron-core on a machine without CUDA: the one place of headrace that patches somebody else's module.

Megatron-core 0.16 runs on gloo, but names CUDA in its plumbing: current_device() for new tensors, streams and
synchronisation around gradients, an RNG tracker that forks CUDA states, `.cuda()` on small helpers, and
`tensor.type()` compared with "torch.cuda.FloatTensor" when it builds gradient buffers. Each of these is answered here
with what means the same on a CPU. Nothing is patched on a machine with a GPU.

The function mode is thread-local: call `install()` in the thread that computes, before Megatron is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_CPU = torch.device("cpu")
_NAMES_CUDA = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})
"""What may be asked for CUDA without keyword arguments."""


class _Stream:
    """A class, because transformers uses torch.cuda.Stream in an annotation; every operation is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _RngTracker(megatron_random.CudaRNGStatesTracker):
    """Weights come from a checkpoint and dropout is off, so no rank needs random numbers of its own."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device="cuda" to the CPU and answers Tensor.type() with the CUDA name that Megatron compares with."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _NAMES_CUDA:
            return func(*args)  # a small model's step makes thousands of such calls
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.startswith("cuda")
    )


@lru_cache(maxsize=32)
def _causal_mask(size: int) -> torch.Tensor:
    """Recomputation runs inside an autograd function, where no function mode is active."""
    return torch.ones(size, size, dtype=torch.bool).triu(diagonal=1)


def _maybe_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The sizes of an all-to-all, which Megatron turns into numpy only on their way from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def install() -> None:
    """Adapts Megatron for the calling thread, for good. Harmless when called again."""
    cuda: Any = torch.cuda
    module: Any = torch.nn.Module
    if cuda.Stream is not _Stream:
        cuda.current_device = lambda: _CPU
        cuda.Stream = _Stream
        cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
        cuda.stream = lambda *_: contextlib.nullcontext()
        cuda.synchronize = lambda *_: None
        cuda.empty_cache = lambda: None
        module.cuda = lambda self, *_: self
        # Recomputation saves and restores it around its second forward pass.
        megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
        megatron_random._set_cuda_rng_state = lambda *_, **__: None
        fused_softmax.get_default_causal_mask = _causal_mask
        token_dispatcher.maybe_move_tensor_to_cpu = _maybe_as_numpy
        # Both speak of Transformer Engine's classes without asking whether they are there.
        moe_utils.te_general_gemm = None
        multi_latent_attention.HAVE_TE = False
        megatron_random._CUDA_RNG_STATE_TRACKER = _RngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    if not any(isinstance(mode, _CudaMeansCpu) for mode in _get_current_function_mode_stack()):
        _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]  # of torch, without annotations
