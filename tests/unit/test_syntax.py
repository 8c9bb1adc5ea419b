"""A good text is a tree, whatever else the process does in the middle of it."""

from __future__ import annotations

import ast
import gc

import pytest

from headrace.limits import syntax_tree

LINES = 3000
TEXT = "\n".join(f"x{i} = [1, (2, {i})]" for i in range(LINES))


def test_a_traceback_that_the_collector_logs_in_the_middle_costs_no_tree() -> None:
    """A traceback's lines are parsed, too, from further down the stack."""
    collections = iter("1")

    def logs(phase: str, _: object) -> None:
        if phase == "stop" and next(collections, None):
            parse_further_down(20)

    gc.callbacks.append(logs)
    try:
        assert len(syntax_tree(TEXT).body) == LINES
        assert next(collections, None) is None, "nothing was collected in the middle"
    finally:
        gc.callbacks.remove(logs)


def test_a_text_that_is_no_python_raises_as_ever() -> None:
    with pytest.raises(SyntaxError):
        syntax_tree("def")


def parse_further_down(frames: int) -> None:
    if frames:
        parse_further_down(frames - 1)
    else:
        ast.parse("a = [1, (2, 3)]")
