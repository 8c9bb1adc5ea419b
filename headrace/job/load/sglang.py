"""Lists SGLang's own arguments from its source, without importing it (an import takes ten seconds)."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from headrace.errors import ConfigError
from headrace.suggest import did_you_mean
from headrace.syntax import syntax_tree


@cache
def server_args() -> frozenset[str]:
    """Fields of ServerArgs; empty where SGLang is not installed (the engines may be on another machine)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "srt"
    files = [source / "server_args.py", *sorted((source / "arg_groups" / "fields").glob("*.py"))]
    return frozenset(name for file in files if file.is_file() for name in _fields(file))


def require_known(name: str, origin: str) -> None:
    """Raises ConfigError when SGLang is installed and has no such argument."""
    known = server_args()
    if known and name not in known:
        parts = sorted(each for each in known if each.startswith(f"{name}_"))
        near = f": it has {', '.join(parts)}" if parts else did_you_mean(name, known)
        raise ConfigError(f"{origin}: SGLang has no argument {name}{near}", field=f"sglang.{name}")


def _fields(file: Path) -> list[str]:
    return [
        statement.target.id
        for node in syntax_tree(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    ]
