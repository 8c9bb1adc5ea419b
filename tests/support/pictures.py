"""Files of images for tests."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(width: int, height: int, seed: int = 0, mode: str = "RGB") -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()
