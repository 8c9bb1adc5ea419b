"""No test asserts how long something takes: a machine that is busy with other work fails none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.limits import syntax_tree

TESTS = Path(__file__).parents[1]
CLOCKS = frozenset({"monotonic", "perf_counter", "process_time", "thread_time", "time"})
_MAY_TIME = re.compile(rf"\basyncio\.(timeout|wait_for)\(|\b({'|'.join(CLOCKS)})\(")
"""Parsing all of the code would take seconds."""
ENOUGH_SECONDS = 60
"""A deadline that is there so that a hang ends."""


def timed(source: str) -> Iterator[str]:
    """Assertions about elapsed time, and deadlines that a busy machine may miss."""
    tree = syntax_tree(source)
    elapsed = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _has_difference(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and (_has_difference(node.test) or _names(node.test) & elapsed):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.timeout", "asyncio.wait_for"):
            limit = node.args[-1]
            seconds = constants.get(limit.id) if isinstance(limit, ast.Name) else getattr(limit, "value", None)
            if isinstance(seconds, int | float) and seconds < ENOUGH_SECONDS:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _has_difference(expression: ast.AST) -> bool:
    """True for `time.monotonic() - began` and whatever contains it."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _calls(node) & CLOCKS
        for node in ast.walk(expression)
    )


def _calls(expression: ast.AST) -> set[str]:
    called = (node.func for node in ast.walk(expression) if isinstance(node, ast.Call))
    return {function.attr for function in called if isinstance(function, ast.Attribute)}


def _names(expression: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def test_no_test_asserts_seconds_and_no_deadline_is_short() -> None:
    """Benchmarks measure seconds: that is what they are for."""
    files = [path for path in TESTS.rglob("*.py") if "bench" not in path.relative_to(TESTS).parts]
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in files}
    found = {path: list(timed(text)) for path, text in texts.items() if _MAY_TIME.search(text)}
    assert {path: lines for path, lines in found.items() if lines} == {}, "count calls, bytes or events instead"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert time.monotonic() - began < 3", 1),
        ("took = time.perf_counter() - began\nassert took < LIMIT", 1),
        ("async with asyncio.timeout(5):\n    pass", 1),
        ("SOON = 3.0\nasync with asyncio.timeout(SOON):\n    pass", 1),
        ("assert time.monotonic() < end\nSECONDS = 120.0\nasyncio.wait_for(process.wait(), SECONDS)", 0),
    ],
)
def test_seconds_are_recognized(source: str, count: int) -> None:
    assert len(list(timed(source))) == count
