"""Arrays as they travel: raw little-endian bytes under a name, a dtype and a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.wire.limits import MAX_COLUMN_BYTES, MAX_COLUMN_RANK

DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_UINT8: np.dtype("<u1"),
    pb.DTYPE_INT16: np.dtype("<i2"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
}
_NUMBERS: Mapping[np.dtype[Any], pb.Dtype.ValueType] = {
    dtype: pb.Dtype.ValueType(number) for number, dtype in DTYPES.items()
}


def pack_column(name: str, array: NDArray[Any]) -> pb.Column:
    """An array as raw little-endian bytes. Raises InvalidArgument for a dtype off the whitelist."""
    number = _NUMBERS.get(array.dtype.newbyteorder("<"))
    if number is None:
        allowed = ", ".join(str(d) for d in _NUMBERS)
        raise InvalidArgument(f"column {name}: dtype {array.dtype} cannot travel; use one of {allowed}")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Column(name=name, dtype=number, shape=array.shape, data=little.tobytes())


def unpack_column(column: pb.Column) -> NDArray[Any]:
    """The array of a column (read-only, no copy). Raises InvalidArgument when shape, dtype and bytes disagree."""
    dtype, shape = DTYPES.get(column.dtype), tuple(column.shape)
    if dtype is None:
        raise InvalidArgument(f"column {column.name}: dtype {column.dtype} is not known here")
    check_shape(column.name, dtype, shape, len(column.data))
    return np.frombuffer(column.data, dtype=dtype).reshape(shape)


def check_shape(name: str, dtype: np.dtype[Any], shape: Sequence[int], num_bytes: int) -> None:
    """Raises InvalidArgument unless an array of this shape has exactly these bytes. No product overflows."""
    if len(shape) == 1 and shape[0] * dtype.itemsize == num_bytes:
        return
    if len(shape) <= MAX_COLUMN_RANK and min(shape, default=0) >= 0:
        elements = prod(shape)
        if elements * dtype.itemsize == num_bytes and (elements or prod(n or 1 for n in shape) <= MAX_COLUMN_BYTES):
            return  # numpy refuses shapes of no elements by their other dimensions
    raise InvalidArgument(
        f"column {name}: shape {[str(n)[:20] for n in shape[:MAX_COLUMN_RANK]]} of {dtype} is no array of {num_bytes} "
        f"bytes; {MAX_COLUMN_RANK} dimensions at most"
    )
