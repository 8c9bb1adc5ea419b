"""Images of samples as columns: `multimodal_inputs` (a file's bytes each) and `multimodal_train_inputs` (arrays).

The columns are named after the field: `multimodal_inputs.images.0`, `multimodal_train_inputs.pixel_values`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.models.architecture import Vision
from headrace.sample_checks import TOKENS

RAW = "multimodal_inputs"
PROCESSED = "multimodal_train_inputs"
PIXEL_VALUES = f"{PROCESSED}.pixel_values"
"""Column float32 [patches, numbers of a patch]: all images of a sample, as the image processor gives them."""
IMAGE_GRIDS = f"{PROCESSED}.image_grid_thw"
"""Column int64 [images, 3]: how many patches each image has in time, from top to bottom and from left to right."""

MAX_IMAGES = 32
"""Images of a sample."""
MAX_INPUTS = 16
"""Arrays of a sample that a model is given beside its tokens."""
MAX_IMAGE_BYTES = 16 << 20
"""The file of an image."""
MAX_IMAGE_PIXELS = 64 << 20
"""Width times height of an image."""
_MAX_SIDE = 1 << 14
"""Patches of an image in one direction."""
_KIND = re.compile(r"[A-Za-z_]\w{0,63}")

Columns = dict[str, NDArray[Any]]


def raw_columns(name: str, inputs: Any) -> Columns:
    """Columns of `{"images": [bytes, …]}`; kinds without any are left out. Raises InvalidArgument, naming the value."""
    columns: Columns = {}
    for kind, files in _mapping(f"{name} {RAW}", inputs):
        if files is None:
            continue
        if not isinstance(files, list | tuple) or not all(isinstance(file, bytes) for file in files):
            raise InvalidArgument(
                f"{name} {RAW}[{kind!r}] is {_kind(files)}, must be a list of images: PIL images, or their files' bytes"
            )
        if len(columns) + len(files) > MAX_IMAGES:
            raise InvalidArgument(f"{name} {RAW} has {len(columns) + len(files)} images, may have {MAX_IMAGES}")
        for number, file in enumerate(files):
            if len(file) > MAX_IMAGE_BYTES:
                raise InvalidArgument(
                    f"{name} {RAW}[{kind!r}][{number}] has {len(file)} bytes, may have {MAX_IMAGE_BYTES}"
                )
            columns[f"{RAW}.{kind}.{number}"] = np.frombuffer(file, np.uint8)
    return columns


def processed_columns(name: str, inputs: Any) -> Columns:
    """Columns of `{"pixel_values": array, …}`; None is left out. Raises InvalidArgument, naming the value."""
    columns: Columns = {}
    given = _mapping(f"{name} {PROCESSED}", inputs)
    if len(given) > MAX_INPUTS:
        raise InvalidArgument(f"{name} {PROCESSED} has {len(given)} arrays, may have {MAX_INPUTS}")
    for key, values in given:
        if values is None:
            continue
        try:
            array = np.asarray(values)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidArgument(f"{name} {PROCESSED}[{key!r}] is no array of numbers: {error}") from error
        if array.dtype == bool:
            array = array.astype(np.uint8)
        if array.dtype.kind not in "iuf":
            raise InvalidArgument(f"{name} {PROCESSED}[{key!r}] is of {array.dtype}, must be numbers")
        columns[f"{PROCESSED}.{key}"] = array.astype(np.float32) if array.dtype == np.float16 else array
    return columns


def raw_of(columns: Mapping[str, NDArray[Any]]) -> dict[str, list[bytes]] | None:
    """The inverse of `raw_columns`; None without such columns, and for numbers that are not 0, 1, 2 and so on."""
    found: dict[str, dict[int, bytes]] = {}
    for name, array in columns.items():
        field, _, rest = name.partition(".")
        kind, _, number = rest.partition(".")
        if field == RAW and number.isdecimal() and array.dtype == np.uint8:
            found.setdefault(kind, {})[int(number)] = array.tobytes()
    if not all(sorted(files) == list(range(len(files))) for files in found.values()):
        return None
    return {kind: [files[number] for number in sorted(files)] for kind, files in found.items()} or None


def processed_of(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]] | None:
    """The inverse of `processed_columns`; None without such columns."""
    return {
        name.removeprefix(f"{PROCESSED}."): array for name, array in columns.items() if name.startswith(f"{PROCESSED}.")
    } or None


def image_starts(
    name: str, vision: Vision, tokens: NDArray[Any], columns: Mapping[str, NDArray[Any]]
) -> Sequence[tuple[int, tuple[int, int, int]]]:
    """Returns for each image where its tokens begin, and its grid in embeddings (time, height, width).

    An image token that no image is left for is a token like any other: a policy may sample one.
    Raises InvalidArgument when pixels, grids and tokens contradict each other.
    """
    grids, pixels = columns.get(IMAGE_GRIDS), columns.get(PIXEL_VALUES)
    if grids is None and pixels is None:
        return ()
    grids = _checked_grids(name, grids, vision)
    num_patches = int(grids.prod(axis=1).sum())
    if pixels is None or pixels.dtype != np.float32 or pixels.shape != (num_patches, vision.patch_values):
        found = "absent" if pixels is None else f"{pixels.dtype} {list(pixels.shape)}"
        expected = [num_patches, vision.patch_values]
        raise InvalidArgument(f"{name} {PIXEL_VALUES} is {found}, must be float32 {expected} for its images")
    if not np.isfinite(pixels).all():
        raise InvalidArgument(f"{name} {PIXEL_VALUES} has values that are not finite")
    merge = vision.merge_size
    found_starts, at = [], 0
    is_image = tokens == vision.image_token_id
    for number, (time, height, width) in enumerate(grids.tolist()):
        size = time * height * width // merge**2
        following = np.flatnonzero(is_image[at:])
        start = at + int(following[0]) if len(following) else len(tokens)
        if not is_image[start : start + size].all() or start + size > len(tokens):
            raise InvalidArgument(
                f"{name} {TOKENS} have no {size} image tokens ({vision.image_token_id}) in a row for image {number} of "
                f"{len(grids)}, whose grid is {[time, height, width]}"
            )
        found_starts.append((start, (time, height // merge, width // merge)))
        at = start + size
    return found_starts


def _checked_grids(name: str, grids: NDArray[Any] | None, vision: Vision) -> NDArray[np.int64]:
    if grids is None or grids.dtype != np.int64 or grids.ndim != 2 or grids.shape[1] != 3 or len(grids) > MAX_IMAGES:
        found = "absent" if grids is None else f"{grids.dtype} {list(grids.shape)}"
        raise InvalidArgument(
            f"{name} {IMAGE_GRIDS} is {found}, must be int64 [images, 3] of at most {MAX_IMAGES} images"
        )
    if (grids < 1).any() or (grids > _MAX_SIDE).any() or (grids[:, 1:] % vision.merge_size).any():
        raise InvalidArgument(
            f"{name} {IMAGE_GRIDS} is {grids.tolist()}, must be images' patches, a multiple of {vision.merge_size} in "
            "height and width"
        )
    return grids


def _mapping(name: str, inputs: Any) -> Sequence[tuple[str, Any]]:
    if inputs is None:
        return ()
    if not isinstance(inputs, Mapping):
        raise InvalidArgument(f"{name} is {_kind(inputs)}, must be a dict")
    for key in inputs:
        if not isinstance(key, str) or not _KIND.fullmatch(key):
            raise InvalidArgument(f"{name} has the key {key!r:.80}, must be a name of letters, digits and underscores")
    return list(inputs.items())


def _kind(value: Any) -> str:
    return type(value).__name__
