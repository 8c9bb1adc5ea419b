"""Reads from its signature which arguments a user's callable takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Signature:
    """`required` and `optional` positional parameters in order, and keyword-only ones that must be given."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    required_keywords: tuple[str, ...]
    takes_keywords: bool

    @classmethod
    def of(cls, target: Callable[..., Any]) -> Signature:
        """Reads it; a class is read by its `__init__` without self."""
        parameters = inspect.signature(target).parameters.values()
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        return cls(
            required=tuple(p.name for p in positional if p.default is p.empty),
            optional=tuple(p.name for p in positional if p.default is not p.empty),
            required_keywords=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty),
            takes_keywords=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )


def wrong_signature(path: str, target: Callable[..., Any], accepted: tuple[str, ...]) -> ConfigError:
    """Says what was found and what would be right."""
    found = f"{target.__name__}{inspect.signature(target)}"
    return ConfigError(
        f"hook {path}: {found} cannot be called; accepted are:\n" + "\n".join(f"  {a}" for a in accepted)
    )
