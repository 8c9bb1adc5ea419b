"""The program in a response, and the tests of a programming task, read from the forms in which data sets carry them.

They are `metadata.tests`, `verification_info`, `input_output` or `test_list`, else the label; JSON text will do.

| data set | form |
|---|---|
| APPS, TACO | `{"inputs": […], "outputs": […]}`, with `fn_name` for a function's arguments and results |
| LiveCodeBench | `[{"input", "output", "testtype": "stdin" or "functional"}, …]`, with `metadata.func_name` |
| PrimeIntellect | `{"test_cases": [{"type": "stdin_stdout" or "function_call", "input", "output", "fn_name"}, …]}` |
| MBPP | `["assert …", …]`, with `metadata.test_setup_code` and `metadata.test_imports` |

An assertion is cut in two. Its calls of the tested program run where the program is; everything around them, with the
expected results, is computed elsewhere from the plain data that they return.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from headrace.errors import InvalidArgument
from headrace.limits import syntax_tree
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking

# The program in a response, and the names that it may use without an import.
# Data sets' own checkers (LiveCodeBench, TACO) and LeetCode import the modules of `_MODULES` and their names in front
# of each program, so answers are written without those imports. Of them a program is given the names that stand in its
# text.

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
_DEEP = "import sys\nsys.setrecursionlimit(50_000)"
"""As in LiveCodeBench's checker."""
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
    if line.lstrip().startswith(f"{fence} ") and fence not in line.lstrip()[len(fence) :]:
        return ""  # a sentence goes on behind it
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
    return "\n".join([_DEEP, *lines])


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


MOST_TESTS = 64
_KEYS = ("tests", "verification_info", "input_output", "test_list")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """The program reads `given` and has to write `expected`."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function's result has to be `expected`, by `same_json`; that may be the one entry of a list, as in APPS."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    is_wrapped: bool


@dataclass(frozen=True, slots=True)
class ValueTest:
    """The value of an expression of the program has to be `expected`, a literal."""

    expression: str
    expected: Any


@dataclass(frozen=True, slots=True)
class TruthTest:
    """An expression has to be true. Its `{TESTED}(n, variables)` is the value of the n-th of the program's `parts`."""

    expression: str
    parts: Sequence[str]


TESTED = "_tested_part"

Test = StdinTest | CallTest | ValueTest | TruthTest


@dataclass(frozen=True, slots=True)
class CodeTests:
    """A task's tests, and what is run in front of the program."""

    tests: Sequence[Test]
    setup: str = ""


def tests_of(item: ScoreItem) -> CodeTests:
    """Raises InvalidArgument for tests that are missing or of no known form."""
    given = next((item.metadata[key] for key in _KEYS if item.metadata.get(key) is not None), item.label)
    setup = item.metadata.get("test_setup_code") or ""
    imports = item.metadata.get("test_imports") or ()
    if not isinstance(setup, str) or not isinstance(imports, list | tuple):
        raise InvalidArgument("scorer code: metadata.test_setup_code is text, and metadata.test_imports a list of it")
    setup = "\n".join([*map(str, imports), setup])
    found = _read(_parsed(given), item.metadata, _Cut(setup))
    if not found:
        raise InvalidArgument("scorer code: the list of tests is empty")
    return CodeTests(found[:MOST_TESTS], setup)


def _parsed(given: Any) -> Any:
    if given is None:
        raise InvalidArgument(
            f"scorer code needs tests in {', '.join(f'metadata.{key}' for key in _KEYS)}, or in the label"
        )
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        if given.lstrip().startswith("assert"):
            return [given]
        raise InvalidArgument(f"scorer code: the tests are text that is no JSON: {error}") from error


def _read(given: Any, metadata: Mapping[str, Any], cut: _Cut) -> list[Test]:
    match given:
        case {"test_cases": list(cases)}:
            return [_case(case, metadata) for case in cases]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            if len(inputs) != len(outputs):
                raise InvalidArgument(f"scorer code: {len(inputs)} inputs have {len(outputs)} outputs")
            name = given.get("fn_name")
            return [_pair(name, *each) for each in zip(inputs, outputs, strict=True)]
        case [str(), *_]:
            return [test for text in given for test in _assertions(text, cut)]
        case [dict(), *_]:
            return [_case(case, metadata) for case in given]
        case []:
            return []
    raise InvalidArgument(
        f"scorer code: tests are a {type(given).__name__} of none of the forms that docs/rewards.md lists"
    )


def _case(case: Any, metadata: Mapping[str, Any]) -> Test:
    if not isinstance(case, dict) or "input" not in case or "output" not in case:
        raise InvalidArgument(f"scorer code: a test has no input or no output: {case!r:.80}")
    kind = case.get("type", case.get("testtype", "stdin"))
    if kind in ("stdin", "stdin_stdout"):
        return _pair(None, case["input"], case["output"])
    if kind not in ("functional", "function_call"):
        raise InvalidArgument(f"scorer code: a test is of the type {kind!r:.40}: stdin_stdout or function_call")
    name = case.get("fn_name") or metadata.get("func_name") or metadata.get("fn_name")
    given, expected = case["input"], case["output"]
    if isinstance(given, str):
        given = [_json(line) for line in given.splitlines() if line.strip()]
    if isinstance(expected, str):  # LiveCodeBench's JSON
        return _pair(name or "", given, _json(expected), is_wrapped=False)
    return _pair(name or "", given, expected)


def _pair(name: Any, given: Any, expected: Any, *, is_wrapped: bool = True) -> Test:
    if name is None:
        return StdinTest(_lines(given), _lines(expected))
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgument(f"scorer code: the tested function's name is {name!r:.40}: say it as fn_name")
    return CallTest(name, tuple(given) if isinstance(given, list | tuple) else (given,), expected, is_wrapped)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _assertions(text: Any, cut: _Cut) -> list[Test]:
    try:
        return [cut.test_of(node) for node in syntax_tree(text).body]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"scorer code: a test cannot be read: {text!r:.80}: {error}") from error


class _Cut:
    """Tells what of an assertion is the program's: the names that neither Python, checkers nor the setup define."""

    def __init__(self, setup: str) -> None:
        self._imported: set[str] = set()
        self._defined: set[str] = set()
        try:
            nodes = list(ast.walk(syntax_tree(setup)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = []  # it fails where it runs
        for node in nodes:
            match node:
                case ast.Import(names) | ast.ImportFrom(_, names):
                    self._imported |= {(each.asname or each.name).split(".")[0] for each in names}
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                    self._defined.add(name)
                case ast.Name(name, ast.Store()):
                    self._defined.add(name)

    def test_of(self, node: ast.stmt) -> Test:
        """Raises ValueError for another statement."""
        if not isinstance(node, ast.Assert):
            raise ValueError("it is no assertion")
        test = node.test
        tested = self._tested(test)
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            for value, other in ((test.comparators[0], test.left), (test.left, test.comparators[0])):
                if _root(other) in tested and any(isinstance(each, ast.Call) for each in _chain(other)):
                    with suppress(ValueError):
                        return ValueTest(ast.unparse(other), ast.literal_eval(value))
        parts = _Parts(tested, _bound(test))
        cut = parts.visit(test)
        return TruthTest(ast.unparse(ast.fix_missing_locations(cut)), tuple(parts.found))

    def _tested(self, test: ast.expr) -> set[str]:
        """The names of the program. Where all are known (a task may ask for `gcd`), those of the functions called."""
        loaded = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} - _bound(test)
        known = _of_python() | checkers_names().keys() | self._imported | self._defined
        if unknown := loaded - known - {"np", "numpy"}:
            return unknown
        roots = {_root(node) for node in ast.walk(test) if isinstance(node, ast.Call)}
        called = {name for name in loaded if name in roots}
        others = {name for name in called if not (name in _of_python() or name in _COMPARERS or is_module(name))}
        return (others - self._imported) or others or called or loaded


_COMPARERS = ("isclose", "Counter", "deque", "defaultdict", "OrderedDict")
"""Names that checkers import and that tests use around a result."""


def _of_python() -> set[str]:
    return set(dir(builtins))


def _bound(test: ast.AST) -> set[str]:
    """Names that the expression itself defines: in comprehensions, lambdas and with `:=`."""
    stored = {node.id for node in ast.walk(test) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)}


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """The expression, and what it is a call, an attribute or an item of."""
    while True:
        yield node
        match node:
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return


def _root(node: ast.expr) -> str | None:
    *_, last = _chain(node)
    return last.id if isinstance(last, ast.Name) else None


class _Parts(ast.NodeTransformer):
    """Replaces what begins with a name of the program. `found` are the expressions that it has replaced."""

    def __init__(self, tested: Set[str], bound: Set[str]) -> None:
        self.found: list[str] = []
        self._tested = tested
        self._bound = bound

    def visit(self, node: ast.AST) -> Any:
        """Returns the node without the program's expressions."""
        if not isinstance(node, ast.expr) or _root(node) not in self._tested:
            return self.generic_visit(node)
        self.found.append(ast.unparse(node))
        loaded = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        names = sorted((loaded & self._bound) - _bound(node))
        variables = ast.Dict([ast.Constant(name) for name in names], [ast.Name(name, ast.Load()) for name in names])
        return ast.Call(ast.Name(TESTED, ast.Load()), [ast.Constant(len(self.found) - 1), variables], [])
