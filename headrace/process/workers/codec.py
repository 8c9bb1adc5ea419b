"""Encodes results as MessagePack in the worker, and decodes them in the service as the function's declared type.

Plain values, dataclasses, enumerations, and arrays and scalars of numpy can be sent; tensors become arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, get_type_hints

import msgspec
import numpy as np

_ARRAY = 1
_KINDS = "biuf"


class Unreadable(Exception):
    """The result is not of the type that the function declares."""


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(value: object) -> bytes:
    """Raises TypeError, ValueError, OverflowError or RecursionError for a value that cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode(function: Callable[..., Any], data: bytes) -> Any:
    """Decodes the result of `function`. Raises Unreadable, which says where it differs from the declared type."""
    return decode_as(_declared(function), data)


def decode_as(kind: Any, data: bytes) -> Any:
    """Decodes a value of the type `kind`. Raises Unreadable, which says where it differs."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise Unreadable(str(error)) from error


@cache
def _declared(function: Callable[..., Any]) -> Any:
    return get_type_hints(function)["return"]


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_array)


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor of torch, which is not imported here
        value = (value.detach().float() if value.is_floating_point() else value.detach()).cpu().numpy()
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"an array of {value.dtype} cannot leave its worker process")
        array = _Array(value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(array))
    raise TypeError(f"a {type(value).__name__} cannot leave its worker process: return plain values")


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"an extension of type {code}")
    array = msgspec.msgpack.decode(data, type=_Array)
    dtype = np.dtype(array.dtype)
    if dtype.kind not in _KINDS or math.prod(array.shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"an array of {dtype} and shape {array.shape} in {len(array.data)} bytes")
    return np.frombuffer(array.data, dtype).reshape(array.shape)
