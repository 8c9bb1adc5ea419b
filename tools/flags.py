"""The table of flags: what each does, its default, and the test that shows that it acts.

    python -m tools.flags            refuses a flag without a test, a test that is gone or that `make test` skips, and a
                                     stale docs/flags.md
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

from headrace.job.megatron import DESCRIBED
from headrace.job.option import ALIASES, Arity, Option, options
from headrace.limits import syntax_tree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
_HEADER = """# Flags

Every option of a job: a key of its section in the job file, `HEADRACE_<NAME>` in the environment, and a flag. Written
by `python -m tools.flags --write`; `make lint` refuses a flag whose test is not named in `tests/flags.toml`. Any other
field of Megatron-core's configs is a flag too ([megatron.md](megatron.md)), and any argument of SGLang's server with
the prefix `--sglang-`.
"""


def described() -> list[Option]:
    """Returns the options that headrace describes; Megatron-core's other fields are its own."""
    return [option for option in options().values() if option.section != "megatron" or option.name in DESCRIBED]


def mistakes(flags: Sequence[Option], shown_by: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """A sentence for each flag without a test, and for each test that is not there or does not name its flag."""
    known = {option.name for option in flags}
    found = [
        f"{option.flag} has no test: name the one that shows what it does in tests/flags.toml"
        for option in flags
        if option.name not in shown_by
    ]
    for name, test in shown_by.items():
        if name not in known:
            found.append(f"tests/flags.toml names {name}, which is no flag")
        elif (wrong := _wrong(name, test, root)) is not None:
            found.append(f"tests/flags.toml: {name} is shown by {test}, {wrong}")
    return found


def page(flags: Sequence[Option], shown_by: Mapping[str, str]) -> str:
    """The text of docs/flags.md."""
    aliases = {name: sorted(alias for alias, option in ALIASES.items() if option == name) for name in ALIASES.values()}
    parts = [_HEADER]
    for section, group in groupby(
        sorted(flags, key=lambda option: _order(flags, option)), key=lambda option: option.section
    ):
        parts.append(f"## {section}\n\n| flag | what it does | default | test |\n|---|---|---|---|")
        parts += [_row(option, aliases.get(option.name, []), shown_by.get(option.name, "none")) for option in group]
        parts.append("")
    return "\n".join(parts)


def _order(flags: Sequence[Option], option: Option) -> tuple[int, int]:
    sections = [*dict.fromkeys(each.section for each in flags if each.section != "megatron"), "megatron"]
    return sections.index(option.section), list(flags).index(option)


def _row(option: Option, aliases: Sequence[str], test: str) -> str:
    names = ", ".join(f"`--{name.replace('_', '-')}`" for name in (option.name, *aliases))
    return f"| {names} | {_cell(option.description)} | {_default(option)} | {_cell(test)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _default(option: Option) -> str:
    if option.required:
        return "required"
    if option.arity is Arity.SWITCH and option.default is not None:
        return "on" if option.default else "off"
    return "" if option.default in (None, ()) else f"`{option.default}`"


def _wrong(name: str, test: str, root: Path) -> str | None:
    file, _, function = test.partition("::")
    if not (root / file).is_file():
        return "and there is no such file"
    if function not in _functions(root / file):
        return "and there is no such test"
    named = re.compile(rf"(?<![\w-]){name}(?![\w-])|--{name.replace('_', '-')}(?![\w-])")
    if not any(named.search(text) for text in _texts(root / file, root)):
        return "which does not name it"
    if function in _gated(root / file, root):
        return "which `make test` skips, as it waits for an environment variable: name a short form of it"
    return None


@cache
def _functions(file: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(syntax_tree(file.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_"))


@cache
def _gated(file: Path, root: Path) -> frozenset[str]:
    """The tests that are skipped without an environment variable: by a mark, in their body, or in a fixture there."""
    tree, switches = syntax_tree(file.read_text()), _switches(file, root)
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and _targets(node) == ["pytestmark"]]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if any(isinstance(node, ast.If) and _skips(node, switches) for node in tree.body):
        return frozenset(node.name for node in functions)
    skipping = {node.name for node in functions if _skips(node, switches)}
    return frozenset(
        node.name
        for node in functions
        if node.name in skipping
        or any(argument.arg in skipping for argument in (*node.args.args, *node.args.kwonlyargs))
        or any(_is_gate(mark, switches) for mark in (*marks, *node.decorator_list))
    )


@cache
def _switches(file: Path, root: Path) -> Mapping[str, bool]:
    """The names of a module that are made of environment variables; True for a mark that skips tests without one."""
    found: dict[str, bool] = {}
    for node in syntax_tree(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            module = root / f"{(node.module or '').replace('.', '/')}.py"
            of_module = _switches(module, root) if module.is_file() else {}
            found |= {each.asname or each.name: of_module[each.name] for each in node.names if each.name in of_module}
        elif isinstance(node, ast.Assign) and _reads_environment(node.value, found):
            found |= dict.fromkeys(_targets(node), _is_gate(node.value, found))
    return found


def _is_gate(mark: ast.expr, switches: Mapping[str, bool]) -> bool:
    """A mark of one parameter leaves the others."""
    names = _names(mark)
    if "parametrize" in names:
        return False
    return any(switches.get(name, False) for name in names) or (
        "skipif" in names and _reads_environment(mark, switches)
    )


def _skips(node: ast.stmt, switches: Mapping[str, bool]) -> bool:
    return "skip" in _names(node) and _reads_environment(node, switches)


def _reads_environment(node: ast.AST, switches: Mapping[str, bool]) -> bool:
    return not _names(node).isdisjoint({"environ", "getenv", *switches})


def _names(node: ast.AST) -> set[str]:
    """The names in an expression or a statement, and those of attributes."""
    nodes = [*ast.walk(node)]
    return {each.id for each in nodes if isinstance(each, ast.Name)} | {
        each.attr for each in nodes if isinstance(each, ast.Attribute)
    }


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


@cache
def _texts(file: Path, root: Path) -> tuple[str, ...]:
    """Returns the text of the test's file and of the modules in tests/ that it imports, which often hold its cases."""
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
