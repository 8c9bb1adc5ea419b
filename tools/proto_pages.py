"""A page for each package of protos/: services, messages and enums with their comments, which say what each means.

The files are formatted by buf (`make lint`), so a line has one declaration and the comment above belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?")
_RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
_FIELD = re.compile(r"((?:optional |repeated )?(?:map<[\w., ]+>|[\w.]+)) (\w+) = (\d+)")
_VALUE = re.compile(r"(\w+) = (\d+)")


@dataclass
class Declaration:
    """A service, message, enum or oneof: its comment, and its fields, values or methods as (name, kind, comment)."""

    kind: str
    name: str
    comment: Sequence[str]
    rows: list[tuple[str, str, Sequence[str]]] = field(default_factory=list)


def proto_pages(folder: Path) -> Mapping[str, str]:
    """The text of each package's page, by the package's short name."""
    files = {path.stem: path.read_text() for path in sorted(folder.glob("headrace/api/*/v1/*.proto"))}
    declared = {name: [*declarations(text)] for name, text in files.items()}
    places = {each.name: name for name, found in declared.items() for each in found}
    return {name: _page(name, text, declared[name], places) for name, text in files.items()}


def declarations(text: str) -> Iterator[Declaration]:
    """Blocks in the order of the file. Fields of a oneof are rows of its message."""
    stack: list[Declaration] = []
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line[2:].removeprefix(" "))
            continue
        if block := _BLOCK.match(line):
            kind, name, is_empty = block.groups()
            stack.append(Declaration(kind, name, comment))
            if kind != "oneof":
                yield stack[-1]
            if is_empty:
                stack.pop()
        elif line == "}":
            stack.pop()
        elif stack and (row := _row(stack[-1], line)):
            of_message = next(each for each in reversed(stack) if each.kind != "oneof")
            of_message.rows.append((row[0], row[1], comment))
        comment = []


def _row(block: Declaration, line: str) -> tuple[str, str] | None:
    if block.kind == "service" and (rpc := _RPC.match(line)):
        name, takes_stream, request, gives_stream, response = rpc.groups()
        return name, f"{takes_stream or ''}{request} → {gives_stream or ''}{response}"
    if block.kind == "enum" and (value := _VALUE.match(line)):
        return value[1], value[2]
    if block.kind in ("message", "oneof") and (found := _FIELD.match(line)):
        return found[2], f"{found[1]} (one of `{block.name}`)" if block.kind == "oneof" else found[1]
    return None


def _page(name: str, text: str, declared: Sequence[Declaration], places: Mapping[str, str]) -> str:
    head = [line[2:].removeprefix(" ") for line in text.partition("syntax =")[0].splitlines()]
    parts = [
        f"# {name}.proto\n",
        _prose(head),
        f"\nPackage `headrace.api.{name}.v1`, in `protos/headrace/api/{name}/v1/{name}.proto`.\n",
    ]
    for each in declared:
        parts.append(f"## {each.name}\n\n{_prose(each.comment)}\n")
        title = {"service": ("call", "request → response"), "enum": ("value", "number")}.get(
            each.kind, ("field", "type")
        )
        if each.rows:
            parts.append(f"| {title[0]} | {title[1]} | meaning |\n|---|---|---|")
            parts += [f"| `{row}` | {_linked(kind, name, places)} | {_cell(said)} |" for row, kind, said in each.rows]
            parts.append("")
    return "\n".join(parts)


def _linked(kind: str, page: str, places: Mapping[str, str]) -> str:
    """The type, with links to where its messages are."""

    def link(word: re.Match[str]) -> str:
        short = word[0].rpartition(".")[2]
        place = places.get(short)
        target = "" if place == page else f"{place}.md"
        return f"[{short}]({target}#{short.lower()})" if place else word[0]

    return re.sub(r"[\w.]+(?![^`]*`\))", link, kind).replace("<", "&lt;")


def _prose(lines: Sequence[str]) -> str:
    """Paragraphs; indented lines and drawings as they are."""
    drawn = any(line.startswith("  ") for line in lines)
    paragraphs = "\n".join(lines).strip("\n").split("\n\n")
    return "\n\n".join(f"```\n{each}\n```" if drawn and "  " in each else _escaped(each) for each in paragraphs)


def _cell(lines: Sequence[str]) -> str:
    return _escaped(" ".join(lines)).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")
