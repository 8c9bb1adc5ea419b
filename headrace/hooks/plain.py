"""A hook's Sample on its way out of its worker process: of headrace's own class, with plain values in its fields."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from headrace.hooks.sample import Sample
from headrace.prompts import label_as_given


def plain(sample: Sample) -> Sample:
    """A copy with lists where there were arrays and tensors, and text where there were numbers as labels and ids.

    Images become the bytes of PNG files; what is given to a model beside its tokens stays arrays and tensors.
    """
    values = {f.name: getattr(sample, f.name) for f in fields(Sample)}
    given = {name: convert(values[name]) for name, convert in _PLAIN.items() if values[name] is not None}
    return Sample(**values | given)


def _listed(values: Any) -> Any:
    if isinstance(values, list) and all(type(value) is int or type(value) is float for value in values):
        return values
    if isinstance(values, list | tuple):
        return [value.item() if hasattr(value, "item") else value for value in values]
    return values.tolist() if hasattr(values, "tolist") else values


def _mask(values: Any) -> Any:
    """0 and 1 as integers, however they were written; what is neither stays, and is refused."""
    listed = _listed(values)
    if not isinstance(listed, list):
        return listed
    return [int(v) if isinstance(v, bool | int | float) and v in (0, 1) else v for v in listed]


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float | np.generic) else value


def _texts(values: Any) -> Any:
    return [_text(value) for value in values] if isinstance(values, list | tuple) else values


def _media(inputs: Any) -> Any:
    """Lists of files for lists of images, by their kind; None where there are none."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {kind: _files(media) for kind, media in inputs.items() if media is not None} or None


def _files(media: Any) -> Any:
    if isinstance(media, list | tuple):
        return [_file(each) for each in media]
    return [_file(media)] if hasattr(media, "save") or isinstance(media, bytes) else media


def _file(image: Any) -> Any:
    """An image of Pillow as PNG; others as they are."""
    if not hasattr(image, "save"):
        return image
    content = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(content, "PNG")
    return content.getvalue()


def _given(inputs: Any) -> Any:
    """A dict of a mapping, such as a processor answers, without what is None."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: values for name, values in inputs.items() if values is not None} or None


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")

_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "tokens": _listed,
    "loss_mask": _mask,
    "rollout_log_probs": _listed,
    "rollout_sampling_mask": lambda rows: [_listed(row) for row in rows],
    "teacher_log_probs": _listed,
    "label": label_as_given,
    "rollout_id": _text,
    "session_id": _text,
    "weight_versions": _texts,
    "multimodal_inputs": _media,
    "multimodal_train_inputs": _given,
}
