"""Exchanging parts of Megatron's specs, wherever in a layer or a block they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def with_parts(spec: Any, chosen: Callable[[str, Any], Any]) -> Any:
    """The spec with `chosen(name of the field, part)` in the place of every part."""
    if isinstance(spec, list | tuple):
        return type(spec)(with_parts(each, chosen) for each in spec)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    parts = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    return dataclasses.replace(spec, **{name: with_parts(chosen(name, part), chosen) for name, part in parts.items()})
