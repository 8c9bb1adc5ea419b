"""Opens the file of an image with Pillow, which is loaded here and only when there is one."""

from __future__ import annotations

import io
from typing import Any

from headrace.errors import InvalidArgument
from headrace.images.columns import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from headrace.wire.checks import shown

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
