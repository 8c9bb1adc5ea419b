"""The images of a prompt: read from where the prompt says they are, and made what engines and the trainer are given.

Paths are below folders that the operator named. Nothing is fetched from a network. Images are resized here, as the
model's image processor resizes them, and engines get the result as PNG: processors of other libraries (Pillow's,
torchvision's) differ in how they resize, and the policy would see other pixels in training.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, InvalidArgument
from headrace.images import (
    IMAGE_GRIDS,
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    PIXEL_VALUES,
    Columns,
    bad_image,
    open_image,
    raw_columns,
    reference,
)
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.production import DataSection, EvalSection
from headrace.job.schema.section import PromptPath
from headrace.limits import MAX_PROMPT_TOKENS, require_at_most, shown
from headrace.models.architecture import Vision
from headrace.models.registry import read_architecture

_SHOWN_CHARACTERS = 200
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImages:
    """The images of a prompt whose tokens have an image token for each embedding."""

    engine_tokens: tuple[int, ...]
    """The prompt with one image token for each image: an engine repeats it itself."""
    data: tuple[str, ...]
    """Each image as PNG in base64, for engines."""
    columns: Columns
    """Columns of its samples, for the trainer and users' functions."""


class ImageReader:
    """The checkpoint's image processor, and the folders whose images prompts may name."""

    def __init__(self, hf_checkpoint: Path, vision: Vision, folders: Sequence[Path]) -> None:
        self._hf_checkpoint = hf_checkpoint
        self._vision = vision
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def load(self) -> None:
        """Loads the processor, which takes seconds, so that no prompt has to. Raises ConfigError without one."""
        _ = self._processor

    def encode(self, tokens: Sequence[int], references: Sequence[str]) -> tuple[tuple[int, ...], EncodedImages]:
        """Returns the prompt with an image token for each embedding, and its images. Blocks.

        `tokens` have one for each image. Raises InvalidArgument, with the reason BAD_IMAGE where an image is to blame.
        """
        require_at_most(len(references), MAX_IMAGES, "images")
        num_places = sum(token == self._vision.image_token_id for token in tokens)
        if num_places != len(references):
            raise InvalidArgument(
                f"the chat template wrote {num_places} image tokens for {len(references)} images: the text of a "
                "prompt may not hold the image token itself",
                field="prompt.messages",
            )
        images = [self._opened(number, each) for number, each in enumerate(references, 1)]
        pixels, grids = self._processed(images)
        embeddings = [int(grid.prod()) // self._vision.merge_size**2 for grid in grids]
        require_at_most(len(tokens) + sum(embeddings), MAX_PROMPT_TOKENS, "prompt tokens")
        files = [_png(image) for image in images]
        columns = raw_columns("the prompt's", {"images": files}) | {PIXEL_VALUES: pixels, IMAGE_GRIDS: grids}
        data = tuple(base64.b64encode(file).decode() for file in files)
        return self._repeated(tokens, embeddings), EncodedImages(tuple(tokens), data, columns)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor  # takes seconds: only for models with a vision tower

        try:
            return AutoImageProcessor.from_pretrained(str(self._hf_checkpoint), backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"no image processor in {self._hf_checkpoint}: {str(error).splitlines()[0]}: copy "
                "preprocessor_config.json or processor_config.json of the model",
                field="model.hf_checkpoint",
            ) from error

    def _processed(self, images: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        try:
            found = self._processor(images=list(images), return_tensors="np")
        except Exception as error:  # a processor refuses sizes and shapes by any exception
            raise bad_image(f"the image processor refuses the prompt's images: {shown(str(error))}") from error
        pixels = np.asarray(found["pixel_values"], np.float32)
        return pixels, np.asarray(found["image_grid_thw"], np.int64)

    def _repeated(self, tokens: Sequence[int], embeddings: Sequence[int]) -> tuple[int, ...]:
        sizes, found = iter(embeddings), list[int]()
        for token in tokens:
            found += [token] * (next(sizes) if token == self._vision.image_token_id else 1)
        return tuple(found)

    def _opened(self, number: int, each: str) -> Any:
        """The image in RGB, of the size that the processor gives it."""
        try:
            image = open_image(self._read(each)).convert("RGB")
            return self._resized(image)
        except InvalidArgument as error:
            name = "inline" if each.startswith("data:") else repr(each[-_SHOWN_CHARACTERS:])
            raise bad_image(f"image {number} ({name}) {error.message}") from error

    def _resized(self, image: Any) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        try:
            height, width = smart_resize(
                image.height,
                image.width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except ValueError as error:
            raise bad_image(f"is {image.width} x {image.height}: {error}") from error
        return image.resize((width, height), resample=processor.resample)

    def _read(self, each: str) -> bytes:
        if each.startswith("data:"):
            return _inline(each)
        path = Path(os.path.realpath(each))
        if not any(folder in path.parents for folder in self._folders):
            raise bad_image("is not below the folder of its prompt file or --prompt-root: move it there")
        try:
            # O_NONBLOCK: a pipe would keep us until somebody writes to it.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                return file.read(MAX_IMAGE_BYTES + 1)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise bad_image(f"cannot be read on the rollout service's machine: {why}") from error


def image_reader(
    hf_checkpoint: Path, data: DataSection, evaluation: EvalSection, prompt_root: Path | None
) -> ImageReader | None:
    """Prompts may name images below `prompt_root`, and beside the job's prompt files; None for a model of text."""
    vision = read_architecture(hf_checkpoint).vision
    if vision is None:
        return None
    files = [
        *(PromptPath.parse(text).path for text in data.prompt_data),
        *(each.prompts.path for each in eval_sets(evaluation)),
    ]
    folders = [file.absolute().parent for file in files]
    return ImageReader(hf_checkpoint, vision, [*folders, *([prompt_root] if prompt_root else [])])


def references_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages as chat templates take them, and where each of their images is, in order.

    Raises InvalidArgument for a part without an image, and for media of another type.
    """
    found: list[str] = []
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_template_part(part, found) for part in content]
        plain.append({**message, "content": content})
    return plain, found


def _template_part(part: Any, found: list[str]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _OTHER_MEDIA:
        raise InvalidArgument(f"content of type {kind} is not supported: text and image are", field="prompt.messages")
    if kind not in ("image", "image_url"):
        return part
    image = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name)), None)
    found.append(reference(image.get("url") if isinstance(image, Mapping) else image, Path("/")))
    return {"type": "image"}


def _inline(url: str) -> bytes:
    header, _, data = url.partition(",")
    if not header.endswith(";base64") or len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise bad_image(f"must be data:…;base64, of at most {MAX_IMAGE_BYTES:,} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_image(f"is no base64: {error}") from error


def _png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
