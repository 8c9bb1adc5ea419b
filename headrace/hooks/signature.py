"""Reads from its signature which arguments a user's callable takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.load import Hook, load_hook

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


def load_function(
    path: str, accepted: tuple[str, ...], positional: Collection[int], also: Collection[str] = ()
) -> Hook:
    """Loads a function that requires so many arguments; `also` names those that it may require beside them.

    Raises ConfigError, with the signatures that are accepted, for a class and for other arguments.
    """
    hook = load_hook(path)
    signature = Signature.of(hook.target)
    num_required = sum(name not in also for name in signature.required)
    if inspect.isclass(hook.target) or num_required not in positional or set(signature.required_keywords) - {*also}:
        raise wrong_signature(hook.path, hook.target, accepted)
    return hook


def takes(hook: Hook, name: str) -> bool:
    """True where the argument can be given by its name."""
    return name in inspect.signature(hook.target).parameters or Signature.of(hook.target).takes_keywords


async def awaited(value: Any) -> Any:
    """What a function returned, or what its coroutine did."""
    return await value if inspect.isawaitable(value) else value


def wrong_signature(path: str, target: Callable[..., Any], accepted: tuple[str, ...]) -> ConfigError:
    """Says what was found and what would be right."""
    found = f"{target.__name__}{inspect.signature(target)}"
    return ConfigError(
        f"hook {path}: {found} cannot be called; accepted are:\n" + "\n".join(f"  {a}" for a in accepted)
    )
