"""Images of prompts: where a row says they are, their files, and the columns of samples that hold them."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.limits import MAX_JSON_BYTES, MAX_PATH_CHARACTERS, require_bytes, shown
from headrace.models.architecture import Vision
from headrace.prompts import value_at
from headrace.trajectory import TOKENS

# Images of samples as columns: `multimodal_inputs` (a file's bytes each) and `multimodal_train_inputs` (arrays).
#
# The columns are named after the field: `multimodal_inputs.images.0`, `multimodal_train_inputs.pixel_values`.

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


BAD_IMAGE = "BAD_IMAGE"
"""The reason of an image that cannot be used."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_image(content: bytes) -> Any:
    """A PIL image whose pixels are read. Raises InvalidArgument for another file, and for one that is too large."""
    from PIL import Image

    if len(content) > MAX_IMAGE_BYTES:
        raise bad_image(f"has {len(content):,} bytes, may have {MAX_IMAGE_BYTES:,}")
    try:
        image = Image.open(io.BytesIO(content), formats=_FORMATS)
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise bad_image(f"is {image.width} x {image.height}, may have {MAX_IMAGE_PIXELS:,} pixels")
        image.load()
    except InvalidArgument:
        raise
    except Exception as error:  # Pillow's decoders raise anything for files that are damaged
        raise bad_image(f"cannot be read as {', '.join(_FORMATS)}: {shown(str(error))}") from error
    return image


def bad_image(why: str) -> InvalidArgument:
    """`why` goes on after the image's name."""
    return InvalidArgument(why, reason=BAD_IMAGE)


# The images of a prompt's row: each placeholder becomes a content part that says where its image is.
#
# Nothing is opened or decoded here; nothing is ever fetched from a network.

PLACEHOLDER = "<image>"
_DATA_URL = "data:;base64,"
_NETWORK = re.compile(r"\s*(?!file:|data:)[A-Za-z][A-Za-z0-9+.-]*://")
_STARTS = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
"""The first bytes of PNG, JPEG, GIF, WebP and BMP."""
_LEAST_BASE64 = 64

Messages = list[dict[str, Any]]


def with_images(content: str | Messages, row: Mapping[str, Any], key: str, folder: Path) -> Messages:
    """The prompt as messages whose placeholders are content parts of type image. A text is one user turn.

    The key's value is an image or a list of them: a path (from `folder`), a data: URL, base64, or, of Parquet, bytes
    or a struct of bytes and path. Raises InvalidArgument unless there are as many as placeholders.
    """
    value = value_at(row, key)
    given = [] if value is None else value if isinstance(value, list) else [value]
    if len(given) > MAX_IMAGES:
        raise InvalidArgument(f"{key!r} has {len(given)} images, may have {MAX_IMAGES}")
    images = iter([reference(image, folder) for image in given])
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    placed = []
    for message in messages:
        parts = [_part(part, images, folder) for part in _parts(message.get("content"))]
        has_image = any(part.get("type") != "text" for part in parts)
        _require_small(parts)
        placed.append({**message, "content": parts} if has_image else message)
    if left := sum(1 for _ in images):
        raise InvalidArgument(
            f"{key!r} has {len(given)} images and the prompt {PLACEHOLDER} for {len(given) - left}: write one for each"
        )
    return placed


def _require_small(parts: list[dict[str, Any]]) -> None:
    inline = sum(len(part["image"]) for part in parts if part.get("type") == "image")
    if inline > MAX_JSON_BYTES // 2:
        require_bytes(len(json.dumps(parts)), MAX_JSON_BYTES, "a message with the images that lie in its row")


def reference(image: Any, folder: Path) -> str:
    """A data: URL, or an absolute path. Raises InvalidArgument for an address in a network, and for other values."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return _DATA_URL + base64.b64encode(image).decode()
    if not isinstance(image, str) or not image:
        raise InvalidArgument(f"an image is {shown(image)}, must be a path, a data: URL, or base64")
    if _NETWORK.match(image):
        raise InvalidArgument(
            f"the image {shown(image)} is in a network, and images are never fetched: store it as a file, and name that"
        )
    if image.startswith("data:"):
        return image
    if _is_base64(image):
        return _DATA_URL + image
    path = image.removeprefix("file://")
    if len(path) > MAX_PATH_CHARACTERS or "\0" in path:
        raise InvalidArgument(f"the image {shown(image)} is no path of at most {MAX_PATH_CHARACTERS} characters")
    return str(folder.absolute() / path)


def _is_base64(text: str) -> bool:
    """True for base64 of a file that begins as an image does."""
    if len(text) < _LEAST_BASE64:
        return False
    try:
        return base64.b64decode(text[:_LEAST_BASE64], validate=True).startswith(_STARTS)
    except (binascii.Error, ValueError):
        return False


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise InvalidArgument(f"content is {shown(content)}, must be text or a list of parts, each an object")
        return content
    pieces = re.split(f"({re.escape(PLACEHOLDER)})", content if isinstance(content, str) else "")
    return [{"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece} for piece in pieces if piece]


def _part(part: dict[str, Any], images: Iterator[str], folder: Path) -> dict[str, Any]:
    """An image part without an image of its own takes the row's next one."""
    if part.get("type") != "image":
        return part
    own = next((part[name] for name in ("image", "path", "url") if part.get(name)), None)
    if own is not None:
        return {"type": "image", "image": reference(own, folder)}
    if (image := next(images, None)) is None:
        raise InvalidArgument(f"the prompt has more {PLACEHOLDER} than its row has images")
    return {"type": "image", "image": image}
