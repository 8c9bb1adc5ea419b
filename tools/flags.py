"""The table of flags: what each does, its default, and the test that shows that it acts.

    python -m tools.flags            refuses a flag without a test, a test that is gone, and a stale docs/flags.md
    python -m tools.flags --write    writes docs/flags.md

Which test shows which flag is said in tests/flags.toml. Tests are parsed, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from headrace.job.leaf import ALIASES, Leaf, Shape, leaves
from headrace.job.megatron.arguments import DESCRIBED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
_HEADER = """# Flags

Every leaf of a job: a key of its section in the job file, `HEADRACE_<NAME>` in the environment, and a flag. Written by
`python -m tools.flags --write`; `make lint` refuses a flag whose test is not named in `tests/flags.toml`. Any other
field of Megatron-core's configs is a flag too ([megatron.md](megatron.md)), and any argument of SGLang's server with
the prefix `--sglang-`.
"""


def described() -> list[Leaf]:
    """Those that headrace says something about; Megatron-core's other fields are its own."""
    return [leaf for leaf in leaves().values() if leaf.section != "megatron" or leaf.name in DESCRIBED]


def mistakes(flags: Sequence[Leaf], shown_by: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """A sentence for each flag without a test, and for each test that is not there or does not name its flag."""
    known = {leaf.name for leaf in flags}
    found = [
        f"{leaf.flag} has no test: name the one that shows what it does in tests/flags.toml"
        for leaf in flags
        if leaf.name not in shown_by
    ]
    for name, test in shown_by.items():
        if name not in known:
            found.append(f"tests/flags.toml names {name}, which is no flag")
        elif (wrong := _wrong(name, test, root)) is not None:
            found.append(f"tests/flags.toml: {name} is shown by {test}, {wrong}")
    return found


def page(flags: Sequence[Leaf], shown_by: Mapping[str, str]) -> str:
    """The text of docs/flags.md."""
    aliases = {name: sorted(alias for alias, leaf in ALIASES.items() if leaf == name) for name in ALIASES.values()}
    parts = [_HEADER]
    for section, group in groupby(sorted(flags, key=lambda leaf: _order(flags, leaf)), key=lambda leaf: leaf.section):
        parts.append(f"## {section}\n\n| flag | what it does | default | test |\n|---|---|---|---|")
        parts += [_row(leaf, aliases.get(leaf.name, []), shown_by.get(leaf.name, "none")) for leaf in group]
        parts.append("")
    return "\n".join(parts)


def _order(flags: Sequence[Leaf], leaf: Leaf) -> tuple[int, int]:
    sections = [*dict.fromkeys(each.section for each in flags if each.section != "megatron"), "megatron"]
    return sections.index(leaf.section), list(flags).index(leaf)


def _row(leaf: Leaf, aliases: Sequence[str], test: str) -> str:
    names = ", ".join(f"`--{name.replace('_', '-')}`" for name in (leaf.name, *aliases))
    return f"| {names} | {_cell(leaf.description)} | {_default(leaf)} | {_cell(test)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(leaf: Leaf) -> str:
    if leaf.required:
        return "required"
    if leaf.shape is Shape.SWITCH and leaf.default is not None:
        return "on" if leaf.default else "off"
    return "" if leaf.default in (None, ()) else f"`{leaf.default}`"


def _wrong(name: str, test: str, root: Path) -> str | None:
    file, _, function = test.partition("::")
    if not (root / file).is_file():
        return "and there is no such file"
    if function not in _functions(root / file):
        return "and there is no such test"
    named = re.compile(rf"(?<![\w-]){name}(?![\w-])|--{name.replace('_', '-')}(?![\w-])")
    if not any(named.search(text) for text in _texts(root / file, root)):
        return "which does not name it"
    return None


@cache
def _functions(file: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(file.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_"))


@cache
def _texts(file: Path, root: Path) -> tuple[str, ...]:
    """Of the test's file and of the modules in tests/ that it imports: cases are often data of theirs."""
    text = file.read_text()
    modules = re.findall(r"^from (tests\.[\w.]+) import", text, re.MULTILINE)
    paths = [root / f"{module.replace('.', '/')}.py" for module in modules]
    return (text, *(path.read_text() for path in paths if path.is_file()))


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    flags = described()
    shown_by = tomllib.loads((ROOT / "tests" / "flags.toml").read_text())["shown_by"]
    found = mistakes(flags, shown_by)
    text = page(flags, shown_by)
    if "--write" in arguments:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        found.append("docs/flags.md is stale: run python -m tools.flags --write")
    print("\n".join(found) if found else f"{len(flags)} flags, {len(shown_by)} with a test that names them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
