"""The product's docstrings are sentences, and their lines are full; Ruff's D rules have the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from headrace.syntax import syntax_tree
from tools.sizes import ROOT, sources

DANGLING = {"What", "Whether", "How", "Of", "Which", "Who", "Whose", "Where", "Those", "By", "As", "So", "At"}
DANGLING |= {"With", "Without", "Whatever", "When", "For", "Until"}
KEPT = ("services/trainer/loop.py",)
"""It stays as it reads."""
ARCHAIC = re.compile(r"\b(whoever|anew|for ever|to be had|so many)\b", re.IGNORECASE)
BROKEN = 60
"""A line that is shorter, in the middle of a sentence, was broken by a tool."""
TABULAR = ("  ", " → ")
"""A line with one of them is a row of a table or a way between states."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[tuple[str, str]]:
    """A place for people, and the docstring as it is written there."""
    for path in sources(ROOT):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("headrace/", "services/")) and name not in KEPT:
            for node in ast.walk(syntax_tree(path.read_text())):
                if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
                    yield f"{name}:{node.body[0].lineno}", text


def is_broken(line: str, following: str) -> bool:
    text = line.strip()
    return 0 < len(text) < BROKEN and following.strip()[:1].islower() and not any(mark in text for mark in TABULAR)


def test_no_docstring_has_words_that_people_no_longer_use() -> None:
    assert [place for place, text in docstrings() if ARCHAIC.search(text)] == []


def test_no_docstring_begins_in_the_middle_of_a_sentence() -> None:
    assert [place for place, text in docstrings() if text.split()[0] in DANGLING] == []


def test_no_line_of_a_docstring_ends_in_the_middle_of_a_sentence() -> None:
    places = [place for place, text in docstrings() for pair in pairwise(text.split("\n")) if is_broken(*pair)]
    assert places == []
