"""Sizes that people can keep in their heads: modules in a folder, lines in a file, and one class for each name.

    python -m tools.sizes

tools/sizes.toml names what is larger today and how large it may be. Its entries only shrink: one that is larger than
it needs to be is refused like a breach. How long and how branched a function may be is Ruff's to say (pyproject.toml).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.syntax import syntax_tree

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"modules": 16, "lines": 300, "classes": 1}
"""`modules` of a folder without its __init__.py, `lines` of a file, `classes` of one name in the product."""

Sizes = Mapping[str, Mapping[str, int]]
"""A kind of LIMITS, what is measured (a folder, a file, a name), and its size."""

_PRODUCT = ("headrace", "services")
_GENERATED = ("headrace/api",)
_WAY_OUT = {
    "modules": "give it rooms",
    "lines": "divide it by its nouns",
    "classes": "a class of one's own wants a name of its own",
}


def sizes(root: Path = ROOT) -> Sizes:
    """Returns the sizes of everything that is larger than its limit."""
    modules: dict[str, int] = defaultdict(int)
    lines: dict[str, int] = {}
    classes: dict[str, int] = defaultdict(int)
    for file in sources(root):
        name, text = file.relative_to(root), file.read_text()
        modules[str(name.parent)] += file.name != "__init__.py"
        lines[str(name)] = text.count("\n")
        if name.parts[0] in _PRODUCT:
            for node in syntax_tree(text).body:
                classes[node.name if isinstance(node, ast.ClassDef) else "_"] += 1
    found = {"modules": modules, "lines": lines, "classes": classes}
    return {kind: _larger(found[kind], limit) for kind, limit in LIMITS.items()}


def _larger(measured: Mapping[str, int], limit: int) -> Mapping[str, int]:
    return {name: size for name, size in measured.items() if size > limit and not name.startswith("_")}


def sources(root: Path) -> Iterator[Path]:
    """Every module that a person writes."""
    for top in (*_PRODUCT, "tests", "tools"):
        for file in sorted((root / top).rglob("*.py")):
            if not file.relative_to(root).as_posix().startswith(_GENERATED):
                yield file


def mistakes(measured: Sizes, allowed: Sizes) -> list[str]:
    """A sentence for each breach, and for each permission that nothing needs."""
    found = []
    for kind, limit in LIMITS.items():
        given = allowed.get(kind, {})
        for name, size in measured[kind].items():
            if size > given.get(name, limit):
                found.append(f"{name}: {size} {kind}, at most {given.get(name, limit)}: {_WAY_OUT[kind]}")
        for name, most in given.items():
            if (size := measured[kind].get(name, limit)) < most:
                found.append(f"{name} has {size} {kind} or fewer: tools/sizes.toml can say so instead of {most}")
    return found


def main() -> int:
    """See the module's docstring."""
    allowed = tomllib.loads((ROOT / "tools" / "sizes.toml").read_text())
    found = mistakes(sizes(), allowed)
    exceptions = ", ".join(f"{len(allowed.get(kind, {}))} with more {kind}" for kind in LIMITS)
    print("\n".join(found) if found else f"folders, files and class names are within their sizes ({exceptions})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
