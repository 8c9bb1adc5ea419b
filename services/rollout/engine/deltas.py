"""A plugin of SGLang's by which engines take deltas: a tensor named `headrace.delta.N` is one, in a bucket or a file.

The model's own loader decides where a checkpoint's tensor lies in the engine: which rows are this rank's, and which
fused parameter has them. It is given a `ChangedTensor`, which has a tensor's shape and its changed values alone. The
loader cuts it and copies the cuts into parameters; a copy writes what changed. An operation that only makes views is
followed without a dense tensor. All others are given one, in which NaN stands for what did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.delta import PREFIX, Change, unpack
from headrace.errors import InvalidArgument

_WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_MOST_BYTES = 1 << 36
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def install() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_WEIGHTS}.load_weights_from_distributed", _from_group, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}.load_weights_only", _from_files, HookType.AROUND)


def _from_group(load: Callable[..., Any], updater: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> Any:
    return load(updater, list(expanded(named_tensors)))


def _from_files(
    load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]], target_device: torch.device
) -> Any:
    return load(model, expanded(weights, target_device), target_device)


def expanded(weights: Iterable[tuple[str, Tensor]], device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a delta in its place, on `device` if it is given, and all others as they are."""
    for name, tensor in weights:
        if not name.startswith(PREFIX):
            yield name, tensor
            continue
        for change in unpack(tensor.cpu().numpy().tobytes(), _MOST_BYTES):
            yield change.name, ChangedTensor.of(change, device or tensor.device)


class ChangedTensor(Tensor):
    """A view of a tensor that is not there: on the meta device, with the changed values of the tensor."""

    positions: Tensor
    """int64, places in the tensor in C order."""
    new_values: Tensor
    whole: torch.Size
    """The tensor's shape."""

    @staticmethod
    def of(change: Change, device: torch.device) -> ChangedTensor:
        """Raises InvalidArgument for a value that is NaN: a dense tensor could not say it."""
        dtype: torch.dtype = getattr(torch, change.dtype)
        bits = torch.from_numpy(change.bits.view(f"i{change.bits.itemsize}" if change.bits.itemsize > 1 else "u1"))
        values = bits.to(device).view(dtype)
        if bool(_is_nan(values).any()):
            raise InvalidArgument(f"{change.name} has values that are not numbers: the training diverged")
        positions = torch.from_numpy(change.positions).to(device, torch.int64)
        whole = torch.Size(change.shape)
        return _view(torch.empty(whole, dtype=dtype, device="meta"), positions, values, whole)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and isinstance(args[1], ChangedTensor):
            args[1].write_to(args[0])
            return args[0]
        if func is Tensor.__setitem__ and isinstance(args[2], ChangedTensor):
            args[2].write_to(args[0][args[1]])
            return None
        changed = args[0] if args and isinstance(args[0], ChangedTensor) else None
        if changed is not None and func is _DEVICE:
            return changed.new_values.device
        if changed is None or func not in _FOLLOWED:
            return func(*_dense(args), **{name: _dense(value) for name, value in kwargs.items()})
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if isinstance(found, tuple | list):
            return type(found)(changed.seen(part) if isinstance(part, Tensor) else part for part in found)
        return changed.seen(found) if isinstance(found, Tensor) else found

    def seen(self, view: Tensor) -> ChangedTensor:
        """A part of it."""
        return _view(view, self.positions, self.new_values, self.whole)

    def dense(self) -> Tensor:
        """All its values, NaN where nothing changed; copies of it write the changed ones."""
        with torch._C.DisableTorchFunctionSubclass():
            view = self.shape, self.stride(), self.storage_offset()
        flat = _nan(self.whole.numel(), self.new_values)
        _bits(flat)[self.positions] = _bits(self.new_values)
        return flat.as_strided(*view).as_subclass(PartlyNaN)

    def write_to(self, target: Tensor) -> None:
        """Writes the changed values of this view into a tensor of its shape."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, strides, first = self.shape, self.stride(), int(self.storage_offset())
            is_one_piece = self.is_contiguous()
        if shape != target.shape:
            target.copy_(self.dense())
            return
        values = self.new_values.to(target.device, target.dtype)
        target = target.detach()
        if is_one_piece and target.is_contiguous():
            ends = torch.tensor([first, first + shape.numel()], device=self.positions.device)
            piece = slice(*torch.searchsorted(self.positions, ends).tolist())
            inside = (self.positions[piece] - first).to(target.device)
            _bits(target.view(-1)).index_copy_(0, inside, _bits(values[piece]))
            return
        rest, inside = self.positions - first, torch.ones_like(self.positions, dtype=torch.bool)
        places = [rest] * len(shape)
        for axis in sorted(range(len(shape)), key=lambda axis: strides[axis], reverse=True):
            places[axis] = rest // strides[axis]
            rest = rest - places[axis] * strides[axis]
            inside &= (places[axis] >= 0) & (places[axis] < shape[axis])
        inside &= rest == 0
        target[tuple(place[inside].to(target.device) for place in places)] = values[inside.to(target.device)]


class PartlyNaN(Tensor):
    """A dense tensor: a copy of it, or of what is made from it, leaves alone what is NaN in it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], PartlyNaN):
            _keep_nan(args[0], args[1].as_subclass(Tensor))
            return args[0]
        if func is Tensor.__setitem__ and isinstance(args[2], PartlyNaN):
            _keep_nan(args[0][args[1]], args[2].as_subclass(Tensor))
            return None
        found: Any = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return found


def _keep_nan(target: Tensor, source: Tensor) -> None:
    target, source = target.detach(), source.to(target.device, target.dtype)
    changed = ~_is_nan(source).expand_as(target)
    _bits(target)[changed] = _bits(source.expand_as(target))[changed]


_DEVICE = vars(torch._C.TensorBase)["device"].__get__
_METHODS = (
    "narrow view chunk split unsqueeze squeeze transpose t permute detach __getitem__ size dim numel stride "
    "is_contiguous element_size is_floating_point __len__"
)
_FUNCTIONS = "narrow chunk split unsqueeze squeeze transpose permute"
_PROPERTIES = "shape dtype ndim layout requires_grad data T"
_FOLLOWED = {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
}
"""What makes views of its first argument, or says what it is like."""


def _view(view: Tensor, positions: Tensor, values: Tensor, whole: torch.Size) -> ChangedTensor:
    made = view.as_subclass(ChangedTensor)
    made.positions, made.new_values, made.whole = positions, values, whole
    return made


def _dense(value: Any) -> Any:
    if isinstance(value, ChangedTensor):
        return value.dense()
    return type(value)(map(_dense, value)) if isinstance(value, tuple | list) else value


def _nan(num_values: int, like: Tensor) -> Tensor:
    """Quiet NaN in each; all bits but the sign in FP8, which knows no other."""
    if like.dtype == torch.float8_e4m3fn:
        return torch.full((num_values,), 0x7F, dtype=torch.uint8, device=like.device).view(like.dtype)
    return torch.full((num_values,), torch.nan, dtype=like.dtype, device=like.device)


def _is_nan(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) & 0x7F) == 0x7F
    return torch.isnan(tensor)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])
