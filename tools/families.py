"""The table of model families: in which layouts tests train each, and what else they show of it.

    python -m tools.families            refuses a stale table in docs/models.md, and a test that is gone
    python -m tools.families --write    writes the table

Every cell is made of the parameters of a test, which are the keys of dicts and the words of tuples in the test's file.
Tests are parsed, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace.limits import syntax_tree
from headrace.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- python -m tools.families --write -->\n", "<!-- end -->\n"
_TINY = "tests/support/models/tiny_families.py"
_UNIT = "tests/unit/trainer"


@dataclass(frozen=True, slots=True)
class Test:
    """A test whose parameters are `FAMILY` or `FAMILY@LAYOUT`."""

    file: str
    function: str
    lists: tuple[str, ...]
    """The variables that hold the parameters."""
    only: str = ""
    """A part that a parameter must have."""


_RANKS = f"{_UNIT}/model/test_families_ranks.py", "test_a_family_is_that_of_transformers_and_trains"
_IMAGES = f"{_UNIT}/model/test_vision_ranks.py", "test_log_probs_with_images_are_those_of_transformers"
_LORA = f"{_UNIT}/model/test_lora_exact.py", "test_log_probs_and_gradients_are_those_of_the_sum_of_weights_and_adapters"
_SERVED = "tests/e2e/test_served_families.py", "test_a_family_is_served_with_the_log_probs_of_transformers"
_PICTURES = "tests/e2e/test_images.py", "test_images_go_from_the_prompt_file_to_the_trained_step"
_FORMS = f"{_UNIT}/test_to_fp8.py"
COLUMNS: Mapping[str, tuple[Test, ...]] = {
    "trained": (Test(*_RANKS, ("FAMILIES", "RUNS")), Test(*_IMAGES, ("RUNS",))),
    "served": (Test(*_SERVED, ("SHAPES",)), Test(*_PICTURES, ("FAMILIES",))),
    "LoRA": (Test(*_LORA, ("RUNS", "STAND_INS")),),
    "MoE parallel": (Test(*_RANKS, ("RUNS",), only="@ep"),),
    "FP8 weights": (Test(_FORMS, "test_what_is_read_of_a_familys_fp8_folder_leaves_as_it_came", ("QUANTIZED",)),),
    "MTP": (Test(_FORMS, "test_layers_that_predict_further_tokens_are_exported_as_they_came", ("WITH_MTP",)),),
}


def mistakes(root: Path = ROOT) -> list[str]:
    """A sentence for each test that is not there, and for each parameter that is of no family."""
    found = []
    for test in (test for tests in COLUMNS.values() for test in tests):
        path = root / test.file
        if not path.is_file() or f"def {test.function}(" not in path.read_text():
            found.append(f"tools/families.py names {test.file}::{test.function}, which is not there")
        else:
            found += [
                f"{test.file}: {name} is no family"
                for name, _ in _shown(test, root)
                if _model_type(name, root) not in {each for family in FAMILIES for each in family.model_types}
            ]
    return found


def table(root: Path = ROOT) -> str:
    """The table, and the tests behind it, as Markdown."""
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in FAMILIES:
        name = ", ".join(each for each in family.model_types if not each.endswith("_text"))
        cells = (_cell(tests, family.model_types, root) for tests in COLUMNS.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| column | tests |", "|---|---|"]
    for column, tests in COLUMNS.items():
        lines.append(f"| {column} | " + ", ".join(f"`{each.file}::{each.function}`" for each in tests) + " |")
    return "\n".join(lines) + "\n"


def _cell(tests: Sequence[Test], model_types: Sequence[str], root: Path) -> str:
    shown = [layout for test in tests for name, layout in _shown(test, root) if _model_type(name, root) in model_types]
    layouts = dict.fromkeys(layout for layout in shown if layout not in ("", "alone"))
    return ", ".join(layouts) or ("yes" if shown else "")


def _shown(test: Test, root: Path) -> Iterator[tuple[str, str]]:
    """The families that the test is run for, and in which layout."""
    for parameter in (each for variable in test.lists for each in _words(root / test.file, variable)):
        family, _, layout = parameter.partition("@")
        if test.only in parameter and family:
            yield family, layout


def _model_type(name: str, root: Path) -> str:
    """A tiny model's; other names are types themselves."""
    entry = _words(root / _TINY, "_FAMILIES").get(name)
    return str(ast.literal_eval(entry.elts[0])) if isinstance(entry, ast.Tuple) else name


@cache
def _words(file: Path, variable: str) -> Mapping[str, ast.expr | None]:
    """The keys of the dicts that a module assigns or adds to a variable, with their values; the words of tuples."""
    found: dict[str, ast.expr | None] = {}
    tree = syntax_tree(file.read_text())
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        entries: Mapping[ast.expr | None, ast.expr | None]
        if isinstance(target, ast.Subscript):
            entries = {target.slice: node.value} if ast.unparse(target.value) == variable else {}
        elif ast.unparse(target) != variable:
            continue
        elif isinstance(node.value, ast.Dict):
            entries = dict(zip(node.value.keys, node.value.values, strict=True))
        elif isinstance(node.value, ast.Tuple):
            entries = dict.fromkeys(node.value.elts)
        else:
            continue
        found |= {_text(key, constants): value for key, value in entries.items() if key is not None}
    return found


def _text(word: ast.expr, constants: Mapping[str, object]) -> str:
    source = ast.unparse(word)
    if isinstance(word, ast.Constant | ast.JoinedStr):
        return re.sub(r"\{(\w+)\}", lambda part: str(constants[part[1]]), source.removeprefix("f").strip("'\""))
    return str(constants[source])


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    found, before = mistakes(), PAGE.read_text()
    head, begin, rest = before.partition(BEGIN)
    text = head + begin + "\n" + table() + "\n" + END + rest.partition(END)[2]
    if "--write" in arguments:
        PAGE.write_text(text)
    elif text != before:
        found.append("the table of docs/models.md is stale: run python -m tools.families --write")
    print("\n".join(found) if found else f"{len(FAMILIES)} families, each cell with its test")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
