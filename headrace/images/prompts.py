"""The images of a prompt's row: each placeholder becomes a content part that says where its image is.

Nothing is opened or decoded here; nothing is ever fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.images.columns import MAX_IMAGES
from headrace.prompts.row import value_at
from headrace.wire.checks import require_bytes, shown
from headrace.wire.limits import MAX_JSON_BYTES, MAX_PATH_CHARACTERS

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
