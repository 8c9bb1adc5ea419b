"""Finds the secrets of a job, which must not leave the machine: passwords in URLs, and values with a secret's name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_PASSWORD = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
_SECRET_NAME = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_NOT_SECRET = frozenset({"input_key", "label_key", "metadata_key", "tool_key", "reward_key", "priority_key"})
"""Leaves that name a key of a JSON object."""


def without_secrets(tree: Any, name: str = "") -> Any:
    """A copy of a tree of plain values without secrets, for a tracker or a bug report."""
    if isinstance(tree, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value, name) for value in tree]
    if isinstance(tree, str):
        return HIDDEN if _is_secret(name) else _PASSWORD.sub(HIDDEN, tree)
    return tree


def passwords(tree: Any, name: str = "") -> list[str]:
    """Names of values that are URLs with a password."""
    return list(_passwords(tree, name))


def _passwords(tree: Any, name: str) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _passwords(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _passwords(value, name)
    elif isinstance(tree, str) and _PASSWORD.search(tree):
        yield name


def _is_secret(name: str) -> bool:
    return name not in _NOT_SECRET and _SECRET_NAME.search(name) is not None
