"""Loads Megatron-core, on a machine without CUDA without what is not used there: a third of a rank's start.

That is torch's compiler, which Megatron's decorators load even where nothing is compiled; the C++ extensions that it
builds for CUDA, with setuptools; and wandb, to which only its own trainer writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_EXTENSIONS = "torch.utils.cpp_extension"


def load_megatron() -> None:
    """Called before another module imports a part of Megatron-core; later does nothing."""
    if "megatron.core" in sys.modules:
        return
    if torch.cuda.is_available():
        import megatron.core
    else:
        with _left_out():
            import megatron.core  # noqa: F401


@contextmanager
def _left_out() -> Iterator[None]:
    """Gives them back when the block ends: a hook of the job's may import each of them for itself."""
    extensions: Any = ModuleType(_EXTENSIONS)
    extensions.CUDA_HOME = extensions.load_inline = None  # names that Megatron imports from it
    placeholders: dict[str, Any] = {_EXTENSIONS: extensions, "wandb": None}  # None: it cannot be imported
    absent = {name: module for name, module in placeholders.items() if name not in sys.modules}
    compiler, torch.compile = torch.compile, _as_it_is  # type: ignore[assignment]
    sys.modules.update(absent)
    try:
        yield
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function
