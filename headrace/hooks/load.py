"""Finding a user's function by `pkg.mod.fn` or `path/file.py:fn`, its version, and the arguments that it takes."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.slime_names import SLIME_IMPORTS, provide_slimes_names
from headrace.limits import nearest

_SLIMES = (
    "pass --slime-imports (or set HEADRACE_SLIME_IMPORTS=true), and `slime.…` is headrace's own where it has the name; "
    "or write `from headrace.hooks import Sample, DynamicFilterOutput, GenerateState, post`, and for its filter "
    "headrace.hooks.filter.check_reward_nonzero_std"
)


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function or class. `version` is a digest of its file: it changes when its results may."""

    path: str
    target: Callable[..., Any]
    version: str
    file: Path


@cache
def load_hook(path: str) -> Hook:
    """Imports it, once a process. Raises ConfigError with the way out when that cannot be."""
    where, name = split_path(path)
    if os.environ.get(SLIME_IMPORTS, "").lower() in ("1", "true", "yes", "on"):
        provide_slimes_names()
    module = _module_of_file(path, Path(where)) if where.endswith(".py") else _module_by_name(path, where)
    if name not in module.__dict__:
        raise ConfigError(f"hook {path}: {where} has no {name!r}{_suggest(name, _functions(module))}")
    target = module.__dict__[name]
    if not callable(target):
        raise ConfigError(f"hook {path}: {name} is a {type(target).__name__}, not a function or class")
    file = Path(str(module.__file__))
    return Hook(path, target, digest_of(file), file)


def split_path(path: str) -> tuple[str, str]:
    """(file or module, name). Raises ConfigError unless it has one of the two forms."""
    if ".py:" in path:
        where, _, name = path.rpartition(":")
    else:
        where, _, name = path.rpartition(".")
    if not where or not name.isidentifier() or path.endswith(".py"):
        raise ConfigError(f"hook {path!r} is neither path/file.py:function nor package.module.function")
    return where, name


def digest_of(file: Path) -> str:
    """The first 12 hexadecimal digits of the file's SHA-256."""
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def _module_of_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        neighbours = [f.name for f in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"hook {path}: no file {file.resolve()}{_suggest(file.name, neighbours)}")
    file = file.resolve()
    name = f"headrace_hook_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"hook {path}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # its neighbours, as for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's module may raise anything
        del sys.modules[name]
        raise _load_failure(path, error) from error
    return module


def _module_by_name(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _is_slimes(error):
            raise _load_failure(path, error) from error
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"hook {path}: there is no module {error.name}: install it, add its folder to PYTHONPATH, "
                "or write path/file.py:function"
            ) from error
        raise _load_failure(path, error) from error
    except Exception as error:  # the user's module may raise anything
        raise _load_failure(path, error) from error


def _load_failure(path: str, error: Exception) -> ConfigError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    hint = f"; {_SLIMES}" if _is_slimes(error) else ""
    return ConfigError(f"hook {path}: loading it raised {type(error).__name__}: {error} ({where}:{line}){hint}")


def _is_slimes(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "slime"


def _functions(module: ModuleType) -> list[str]:
    return [name for name, value in module.__dict__.items() if callable(value) and not name.startswith("_")]


def _suggest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    if near := nearest(name, known):
        return f"; did you mean {near!r}?"
    return f"; there is {', '.join(known[:8])}" if known else ""


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
