"""The tests of a programming task, read from the forms in which data sets carry them.

They are `metadata.tests`, `verification_info`, `input_output` or `test_list`, else the label; JSON text will do.

| data set | form |
|---|---|
| APPS, TACO | `{"inputs": […], "outputs": […]}`, with `fn_name` for a function's arguments and results |
| LiveCodeBench | `[{"input", "output", "testtype": "stdin" or "functional"}, …]`, with `metadata.func_name` |
| PrimeIntellect | `{"test_cases": [{"type": "stdin_stdout" or "function_call", "input", "output", "fn_name"}, …]}` |
| MBPP | `["assert …", …]`, with `metadata.test_setup_code` and `metadata.test_imports` |
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from headrace.syntax import syntax_tree

MOST_TESTS = 64
_KEYS = ("tests", "verification_info", "input_output", "test_list")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """The program reads `given` and has to write `expected`."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function's result has to be `expected`, by `code_values.same_json`."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class ExpressionTest:
    """An expression's value has to be `expected`; of one that `is_truth`, whether it is true."""

    expression: str
    expected: Any
    is_truth: bool = False


Test = StdinTest | CallTest | ExpressionTest


@dataclass(frozen=True, slots=True)
class CodeTests:
    """A task's tests, and what is run in front of the program."""

    tests: Sequence[Test]
    setup: str = ""


def tests_of(item: ScoreItem) -> CodeTests:
    """Raises InvalidArgument for tests that are missing or of no known form."""
    given = next((item.metadata[key] for key in _KEYS if item.metadata.get(key) is not None), item.label)
    found = _read(_parsed(given), item.metadata)
    if not found:
        raise InvalidArgument("scorer code: the list of tests is empty")
    setup = item.metadata.get("test_setup_code") or ""
    imports = item.metadata.get("test_imports") or ()
    if not isinstance(setup, str) or not isinstance(imports, list | tuple):
        raise InvalidArgument("scorer code: metadata.test_setup_code is text, and metadata.test_imports a list of it")
    return CodeTests(found[:MOST_TESTS], "\n".join([*map(str, imports), setup]))


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


def _read(given: Any, metadata: Mapping[str, Any]) -> list[Test]:
    match given:
        case {"test_cases": list(cases)}:
            return [_case(case, metadata) for case in cases]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            if len(inputs) != len(outputs):
                raise InvalidArgument(f"scorer code: {len(inputs)} inputs have {len(outputs)} outputs")
            name = given.get("fn_name")
            return [_pair(name, *each) for each in zip(inputs, outputs, strict=True)]
        case [str(), *_]:
            return [test for text in given for test in _assertions(text)]
        case [dict(), *_]:
            return [_case(case, metadata) for case in given]
        case []:
            return []
    raise InvalidArgument(
        f"scorer code: tests are a {type(given).__name__} of none of the forms that docs/hooks.md lists"
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
    return _pair(name or "", given, _json(expected) if isinstance(expected, str) else expected)


def _pair(name: Any, given: Any, expected: Any) -> Test:
    if name is None:
        return StdinTest(_lines(given), _lines(expected))
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgument(f"scorer code: the tested function's name is {name!r:.40}: say it as fn_name")
    return CallTest(name, tuple(given) if isinstance(given, list | tuple) else (given,), expected)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _assertions(text: Any) -> list[Test]:
    try:
        body = syntax_tree(text).body
        return [_assertion(node) for node in body]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"scorer code: a test cannot be read: {text!r:.80}: {error}") from error


def _assertion(node: ast.stmt) -> ExpressionTest:
    if not isinstance(node, ast.Assert):
        raise ValueError("it is no assertion")
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for value, other in ((test.comparators[0], test.left), (test.left, test.comparators[0])):
            try:
                return ExpressionTest(ast.unparse(other), ast.literal_eval(value))
            except ValueError:
                continue
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ExpressionTest(ast.unparse(test.operand), expected=False, is_truth=True)
    return ExpressionTest(ast.unparse(test), expected=True, is_truth=True)
