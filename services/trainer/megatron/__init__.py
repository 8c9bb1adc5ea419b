"""Megatron-core as the trainer uses it; the only place that knows its versions and its private parts.

In: the job's Megatron arguments. Out: process groups (`parallel`), configs, the optimizer, and models (`gpt`).

On a machine without CUDA three of its imports are left out, which saves a third of a rank's start. Megatron's
decorators load torch's compiler even where nothing is compiled. It builds C++ extensions for CUDA with setuptools. And
only its own trainer writes to wandb.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

_EXTENSIONS = "torch.utils.cpp_extension"


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


with nullcontext() if torch.cuda.is_available() or "megatron.core" in sys.modules else _left_out():
    import megatron.core  # noqa: F401
