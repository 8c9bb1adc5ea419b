"""docs/metrics.md against the names in the trainer's code; tests/chaos/ranks/test_rank_kill.py against a run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from headrace.limits import syntax_tree
from tests.support.metric_docs import documented_metrics, undocumented

TRAINER = Path(__file__).parents[4] / "services" / "trainer"
METRIC = re.compile(r"[a-z_]+(/[a-z_]+X?|/X)+")


def test_every_metric_in_the_code_has_a_row() -> None:
    found = names_in_code()
    assert "reward/mean" in found
    assert "eval/X" in found
    assert not undocumented(found)


def test_every_row_names_a_metric_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in TRAINER.rglob("*.py"))
    found = names_in_code()
    for metric in documented_metrics():
        name = re.sub("[A-Z]+", "X", metric.name)
        assert name in found or f'"{name}"' in code, metric.name


def names_in_code() -> set[str]:
    """String literals with the form of a metric's name; X is what an f-string fills in."""
    literals: set[str] = set()
    for path in TRAINER.rglob("*.py"):
        nodes = list(ast.walk(syntax_tree(path.read_text())))
        filled_in = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts_of = {id(part) for node in filled_in for part in node.values}
        for node in filled_in:
            literals.add("".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values))
        constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts_of)
        literals |= {node.value for node in constants if isinstance(node.value, str)}
    return {literal for literal in literals if METRIC.fullmatch(literal)} - _OTHERS


_OTHERS = {"time/other_seconds", "command/X"}
"""Labels of pictures, and keys of other things that look alike."""
