"""Python's text as a tree."""

from __future__ import annotations

import ast


def syntax_tree(source: str | bytes) -> ast.Module:
    """Returns the module's tree. Raises as `ast.parse` does: SyntaxError, ValueError, RecursionError or MemoryError.

    CPython's count of the tree's depth is one per process: an object that the collector ends in the middle and that
    logs a traceback (which parses, too) leaves it wrong, and a good text then raises SystemError (gh-106905).
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
