"""The program in a response, and the names that it may use without an import.

Data sets' own checkers (LiveCodeBench, TACO) and LeetCode import the modules of `_MODULES` and their names in front of
each program, so answers are written without those imports. Of them a program is given the names that stand in its text.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from headrace.syntax import syntax_tree
from services.reward.scorers.answers import after_thinking

_LANGUAGE = re.compile(r"[ \t{.]*([^\s`{}:,=]*)")
_FENCES = ("```", "~~~")
_PYTHON = re.compile(r"(i?python|py|pypy|sage)[\d.]*", re.IGNORECASE)
_NAME = re.compile(r"[^\W\d]\w*")
_MODULES = (
    *("typing", "collections", "heapq", "bisect", "math", "itertools", "functools", "string", "re", "operator"),
    *("random", "datetime", "copy", "statistics", "fractions", "decimal", "json", "time", "sys", "os", "io"),
)
"""Of a name that several have, the first one of `_FIRST`, then the last one here."""
_FIRST = ("collections", "math", "itertools", "functools", "heapq", "bisect")
_WHOLE = ("sys", "os", "io", "time", "json")
"""Modules without their names, which are those of common variables."""
_ALIASES = {"np": "import numpy as np", "numpy": "import numpy"}


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    code: str


def program_of(response: str) -> str | None:
    """Returns the last block behind the reasoning that says it is Python. None without a block.

    Where none says so: the last one without a language that reads as a program, which sample output does not.
    """
    blocks = list(_blocks(after_thinking(response)))
    if labelled := [block.code for block in blocks if _PYTHON.fullmatch(block.language)]:
        return labelled[-1]
    others = [block.code for block in blocks if not block.language]
    return next(filter(_is_program, reversed(others)), others[-1] if others else None)


@dataclass(frozen=True, slots=True)
class _Opening:
    quote: str
    indent: int
    fence: str
    language: str


def _blocks(text: str) -> Iterator[_Block]:
    lines = iter(text.split("\n"))
    for line in lines:
        if (opening := _opening(line)) is None:
            continue
        code: list[str] = []
        for each in lines:
            inside = each.removeprefix(opening.quote)
            if (end := _before_end(inside, opening.fence)) is not None:
                code += [end] if end.strip() else []
                break
            code.append(inside)
        yield _Block(opening.language, _without_indent(code, opening.indent))


def _opening(line: str) -> _Opening | None:
    """The fence that a line ends with, perhaps behind a list's number or a sentence, and its language."""
    start = min((at for at in map(line.find, _FENCES) if at >= 0), default=None)
    if start is None:
        return None
    before, mark = line[:start], line[start]
    rest = line[start:].lstrip(mark)
    if mark in rest or (mark == "~" and before.strip(" \t>")):
        return None
    quote = before[: before.rfind(">") + 1] if not before.strip(" \t>") else ""
    behind = before[len(quote) :]
    indent = behind[: len(behind) - len(behind.lstrip())]
    (language,) = _LANGUAGE.findall(rest)[:1] or [""]
    return _Opening(quote, len(indent.expandtabs(4)), line[start : len(line) - len(rest)], language)


def _before_end(line: str, fence: str) -> str | None:
    """The code in front of a closing fence, which stands alone or, as models write, behind the last line of code."""
    bare = line.rstrip()
    rest = bare.rstrip(fence[0])
    count = len(bare) - len(rest)
    is_end = count >= len(fence) and (not rest.strip() or (count == len(fence) and fence not in rest))
    return rest if is_end else None


def _without_indent(lines: list[str], indent: int) -> str:
    """Takes off what the fence is indented by; in a list the code may be indented further."""
    cut = []
    for line in lines:
        blank = line[: len(line) - len(line.lstrip(" \t"))].expandtabs(4)
        cut.append(blank[indent:] + line.lstrip(" \t"))
    code = "\n".join(cut)
    first = next((line for line in cut if line.strip()), "")
    return textwrap.dedent(code) if first[:1] == " " else code


def _is_program(code: str) -> bool:
    """False for numbers, words and lists of them, and for what is no Python."""
    try:
        tree = syntax_tree(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    values = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Compare)
    return any(not (isinstance(each, ast.Expr) and isinstance(each.value, values)) for each in tree.body)


def imports_for(source: str) -> str:
    """The imports of the names that stand in the source and that checkers import for it."""
    table, names = checkers_names(), sorted(set(_NAME.findall(source)))
    lines = [f"try:\n    {_ALIASES[name]}\nexcept ImportError:\n    pass" for name in names if name in _ALIASES]
    of_modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if (module := table.get(name)) is not None:
            of_modules[module].append(name)
    for module, of_module in of_modules.items():
        parts = [name for name in of_module if name != module]
        lines += [f"from {module} import {', '.join(parts)}"] if parts else []
        lines += [f"import {module}"] if module in of_module else []
    return "\n".join(lines)


@functools.cache
def checkers_names() -> Mapping[str, str]:
    """The module of each name that checkers import; a module's own name stands for the module."""
    found: dict[str, str] = {}
    for name in (*_MODULES, *reversed(_FIRST)):
        if name not in _WHOLE:
            found |= dict.fromkeys(_public(importlib.import_module(name)), name)
    return {name: of for name, of in found.items() if not hasattr(builtins, name)} | {name: name for name in _MODULES}


def is_module(name: str) -> bool:
    """True for a name that stands for a whole module in front of a program."""
    return name in _MODULES or name in _ALIASES


def _public(module: ModuleType) -> list[str]:
    named = getattr(module, "__all__", None)
    return list(named) if named is not None else [name for name in vars(module) if not name.startswith("_")]
