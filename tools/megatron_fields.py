"""Writes headrace/job/megatron_fields.json from Megatron-core's sources, oldest version first.

    python tools/megatron_fields.py 0.16=…/megatron/core 0.19=…/megatron/core > headrace/job/megatron_fields.json

Sources are parsed, not imported: 0.19 needs a newer Python than the development machine has.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.limits import syntax_tree

_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig", "TransformerConfig"),
    ("transformer/transformer_config.py", "TransformerConfig", "TransformerConfig"),
    ("transformer/transformer_config.py", "MLATransformerConfig", "MLATransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig", "OptimizerConfig"),
    (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
        "DistributedDataParallelConfig",
    ),
)
_SCHEDULER = ("optimizer_param_scheduler.py", "OptimizerParamScheduler")
_PLAIN = {"bool", "int", "float", "str"}
_NAMED = {
    "torch.dtype": 'Literal["float32", "bfloat16", "float16"]',
    "AttnBackend": 'Literal["flash", "fused", "unfused", "local", "auto"]',
}


@dataclass(frozen=True)
class Row:
    """One field: its type as headrace takes it (None: an object that no flag can give), where it is, its default."""

    name: str
    type: str | None
    owners: tuple[str, ...]
    default: str
    versions: tuple[str, ...]


def rows(version: str, core: Path) -> dict[str, Row]:
    """The fields of one version, by name."""
    found: dict[str, Row] = {}
    for name, annotation, default, owner in _fields(core):
        if name in found:
            owners = (*found[name].owners, owner)
            found[name] = replace(found[name], owners=tuple(dict.fromkeys(owners)))
        else:
            found[name] = Row(name, taken_as(annotation), (owner,), default, (version,))
    return found


def taken_as(annotation: str) -> str | None:
    """bool, int, float, str, Literal, tuples of them and unions; None for what no flag can give."""
    for name, replacement in _NAMED.items():
        annotation = annotation.replace(name, replacement)
    return _taken_as(ast.parse(annotation, mode="eval").body)


def _taken_as(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id if node.id in _PLAIN else "tuple[str, ...]" if node.id == "list" else None
    if not isinstance(node, ast.Subscript):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match ast.unparse(node.value):
        case "Optional":
            return _taken_as(node.slice)
        case "Union":
            kinds = [kind for part in parts if (kind := _taken_as(part))]
            return " | ".join(dict.fromkeys(kinds)) or None
        case "Literal":
            return f"Literal[{', '.join(_quoted(part) for part in parts)}]"
        case "list" | "List" | "Tuple" | "tuple":
            kind = _taken_as(parts[0])
            return f"tuple[{kind}, ...]" if kind else None
    return None


def _quoted(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _fields(core: Path) -> Iterator[tuple[str, str, str, str]]:
    for file, name, owner in _CLASSES:
        for statement in _class(core / file, name).body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if not statement.target.id.startswith("_"):
                yield statement.target.id, ast.unparse(statement.annotation), _default(statement.value), owner
    file, name = _SCHEDULER
    init = next(f for f in _class(core / file, name).body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    for argument in init.args.args[2:]:  # after self and the optimizer
        assert argument.annotation is not None
        yield argument.arg, ast.unparse(argument.annotation), "none", name


def _class(file: Path, name: str) -> ast.ClassDef:
    return next(n for n in syntax_tree(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    text = "none" if value is None else ast.unparse(value)
    return {"None": "none", "True": "on", "False": "off"}.get(text, text.strip("'").replace('"', "'"))


def merged(versions: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """All versions' fields; where types differ, both are taken (a choice too new is refused by Megatron itself)."""
    found: dict[str, Row] = {}
    for of_version in versions:
        for name, row in of_version.items():
            if name not in found:
                found[name] = row
                continue
            old = found[name]
            found[name] = replace(row, type=both(old.type, row.type), versions=old.versions + row.versions)
    return found


def both(first: str | None, second: str | None) -> str | None:
    """A type that takes what either takes."""
    if first is None or second is None or first == second:
        return first and second
    choices = [re.fullmatch(r"Literal\[(.*)\]", kind) for kind in (first, second)]
    if all(choices):
        names = [name for choice in choices if choice for name in choice[1].split(", ")]
        return f"Literal[{', '.join(dict.fromkeys(names))}]"
    return " | ".join(dict.fromkeys([*first.split(" | "), *second.split(" | ")]))


def render(table: Mapping[str, Row], versions: Sequence[str]) -> str:
    """The file's text: a line for each field, so that a new version's changes are read in its diff."""
    fields = ",\n".join(
        f"    {json.dumps(row.name)}: {json.dumps(_described(row, versions))}" for row in table.values()
    )
    return f'{{\n  "versions": {json.dumps(versions)},\n  "fields": {{\n{fields}\n  }}\n}}\n'


def _described(row: Row, versions: Sequence[str]) -> dict[str, Any]:
    only = {"only_in": row.versions} if row.versions != tuple(versions) else {}
    return {"type": row.type, "of": row.owners, "default": row.default, **only}


def main(arguments: Sequence[str]) -> None:
    """See the module's docstring."""
    sources = dict(argument.split("=", 1) for argument in arguments)
    table = merged([rows(version, Path(core)) for version, core in sources.items()])
    sys.stdout.write(render(table, list(sources)))


if __name__ == "__main__":
    main(sys.argv[1:])
