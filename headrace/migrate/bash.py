"""Reads a bash script that starts a training, without running it: variables, arrays, conditions, and commands' words.

tree-sitter parses it. A value that bash would compute when the script runs (a command, an argument, a variable of
another machine) keeps its text, so that it can be reported: `$(nproc)`, `${BASE_DIR}`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import isfile  # unlike Path.is_file it takes any text for a name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from tree_sitter import Node

COMPUTED = "$("
"""A value that the script computes has this in it."""
UNSET = "${"
"""A value that has a variable in it that neither the script nor the environment sets."""
DECIDED_LATER = "\0"
"""Begins the words of a branch or loop of which only a run can say whether it is taken."""

_MAX_BYTES = 1 << 20
_MAYBE, _YES = 0.5, 1.0
"""Whether a command runs or a test holds; 0 is no. `and` is the least of two, `or` the greatest."""
_VARIABLE = re.compile(r"\$\{?(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?]).*)?\}?", re.DOTALL)
_ESCAPED, _ESCAPED_IN_QUOTES = re.compile(r"\\(.)", re.DOTALL), re.compile(r'\\(["\\$`\n])')
_REPLACED = (
    *("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"),
    *("concatenation", "string", "raw_string", "ansi_c_string"),
)
_CLAUSES = ("elif_clause", "else_clause")
_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne,
    "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_SUMS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
}  # fmt: skip


@dataclass
class Script:
    """What a script has set and started, in its order."""

    path: Path
    values: dict[str, list[str]]
    """Variables and arrays: the environment's first."""
    commands: list[list[str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that it reads and that are not here."""
    unjoined: list[str] = field(default_factory=list)
    """Flags that begin a line, because the line before has no backslash: they are added to its command."""
    runs: float = _YES
    """Whether what is read now runs."""

    def read(self, text: str) -> None:
        """Takes a script's text, or that of a string which it runs."""
        try:
            self._run(_parsed(text))
        except RecursionError as error:
            raise InvalidArgument(f"{self.path} is too deep: a file loads itself, or brackets have no end") from error

    def command_of(self, *programs: str) -> list[str] | None:
        """The last command that has one of `programs`, from there on. A string of `bash -c` is looked into."""
        for words in reversed(self.commands):
            for number, word in enumerate(words):
                if any(word == program or word.endswith(f"/{program}") for program in programs):
                    return words[number:]
                if any(program in word for program in programs) and len(word.split()) > 1:
                    inner = replace(self, commands=[])
                    inner.read(word)
                    if inner.commands != [[word]] and (started := inner.command_of(*programs)):
                        return started
        return None

    def _run(self, node: Node) -> float:
        """Its result: of a test whether it holds, of anything else that it succeeds."""
        children = node.named_children
        match node.type:
            case "command":
                return self._command(children)
            case "redirected_statement" if children and children[0].type == "command":
                return self._command([*children[0].named_children, *_behind_redirections(children[1:])])
            case "variable_assignment":
                self._assign(node)
            case "test_command" | "negated_command" | "binary_expression":
                return self._holds(node)
            case "list":
                left = self._run(node.children[0])
                if node.children[1].type == "&&":
                    return min(left, self._branch(left, node.children[2:]))
                return max(left, self._branch(1 - left, node.children[2:]))
            case "if_statement":
                reachable = _YES
                for clause in (node, *(child for child in node.children if child.type in _CLAUSES)):
                    reachable = self._clause(clause, reachable)
            case "for_statement" | "c_style_for_statement" | "while_statement" | "case_statement":
                return self._branch(_MAYBE, children)
            case _:
                return self._branch(_YES, children)
        return _YES

    def _branch(self, runs: float, nodes: Sequence[Node]) -> float:
        result, before, self.runs = _YES, self.runs, min(self.runs, runs)
        for node in nodes if runs else ():
            result = self._run(node)
        self.runs = before
        return result

    def _clause(self, clause: Node, reachable: float) -> float:
        """Returns whether the next clause of an if can be reached."""
        types = [child.type for child in clause.children]
        then = types.index("then") if "then" in types else 0
        conditions = [child for child in clause.children[:then] if child.is_named]
        holds = self._holds(conditions[0]) if len(conditions) == 1 else _YES if not then else _MAYBE
        self._branch(min(reachable, holds), [node for node in clause.children[then + 1 :] if node.type not in _CLAUSES])
        return min(reachable, 1 - holds)

    def _command(self, nodes: Sequence[Node]) -> float:
        nodes = [node.children[0] if node.type == "command_name" else node for node in nodes]
        nodes = [node for node in nodes if not node.type.endswith(("_assignment", "_redirect"))]
        words = [word for node in nodes for word in self._words(node)]
        match words:
            case ["source" | ".", file, *_]:
                self._load(file)
            case ["eval", *strings]:
                self.read(" ".join(strings))
            case ["test", *_]:
                return _MAYBE
            case [name, *_] if name.startswith("--") and self.commands:
                self.commands[-1] += words
                self.unjoined.append(name)
            case [_, *_]:
                self.commands.append(words)
        return _YES

    def _assign(self, node: Node) -> None:
        name, value = _source(node.children[0]), node.child_by_field_name("value")
        appends, certain = node.children[1].type == "+=", self.runs == _YES
        before = self.values.get(name, [])
        if value is not None and value.type == "array":
            words = [word for child in value.named_children if child.type != "comment" for word in self._words(child)]
            marked = words if certain else [DECIDED_LATER + word.removeprefix(DECIDED_LATER) for word in words]
            self.values[name] = [*(before if appends or not certain else []), *marked]
        else:
            text = "".join([*(before[:1] if appends else []), "" if value is None else self._text(value)])
            self.values[name] = [text if certain or [text] == before else f"{COMPUTED}{name})"]

    def _holds(self, node: Node) -> float:
        children = node.children
        match node.type:
            case "test_command" | "parenthesized_expression" if node.named_children:
                return self._holds(node.named_children[0])
            case "negated_command" | "unary_expression" if children[0].type == "!":
                return 1 - self._holds(children[1])
            case "list" | "binary_expression" if children[1].type in ("&&", "||"):
                both = self._holds(children[0]), self._holds(children[2])
                return min(both) if children[1].type == "&&" else max(both)
            case "binary_expression" | "unary_expression":
                nodes = children
            case _:
                nodes = [node]
        if any(part.type.endswith(("_expression", "command")) for part in nodes):
            return _MAYBE
        match [UNSET if is_computed(text := self._text(part)) or "*" in text else text for part in nodes]:
            case texts if UNSET in texts:
                return _MAYBE
            case ["-n", text] | [text]:
                return float(bool(text))
            case ["-z", text]:
                return float(not text)
            case [left, test, right] if test in _TESTS:
                numbers = left.isdecimal() and right.isdecimal()
                return float(_TESTS[test](int(left), int(right)) if numbers else _TESTS[test](left, right))
        return _MAYBE

    def _words(self, node: Node, *, quoted: bool = False) -> list[str]:
        """The words that bash makes of an argument."""
        source = _source(node)
        match node.type:
            case "raw_string" | "ansi_c_string":
                return [source.removeprefix("$")[1:-1]]
            case "simple_expansion" | "expansion":
                values = self._values(node)
                if quoted or re.search(r"\[[@*]\]", source) or any(map(is_computed, values)):
                    return values
                return [word for text in values for word in text.split()]
            case "command_substitution":
                return [f"{COMPUTED}{source.strip('`').removeprefix('$(').removesuffix(')')})"]
            case "arithmetic_expansion":
                try:
                    return [str(self._sum(node))]
                except (ArithmeticError, LookupError, ValueError):
                    return [source]
            case "string":
                return self._joined(node, 1, -1, quoted=True)
        return self._joined(node, 0, None, quoted=quoted)

    def _text(self, node: Node) -> str:
        """The value of an argument that is not split into words."""
        return " ".join(self._words(node, quoted=True))

    def _joined(self, node: Node, start: int, end: int | None, *, quoted: bool) -> list[str]:
        """A stretch of a node: what is replaced in it, and the text between."""
        pieces: list[list[str]] = []
        for child in node.named_children:
            last = child.end_byte - node.start_byte
            first = last - len(_source(child).encode())
            if child.type in _REPLACED and first >= start:
                pieces += [_literal(node, start, first), self._words(child, quoted=quoted)]
                start = last
        words: list[str] = []
        for piece in filter(None, [*pieces, _literal(node, start, end)]):
            words = [*words[:-1], "".join(words[-1:]) + piece[0], *piece[1:]]
        return words if pieces or words else [""]

    def _values(self, node: Node) -> list[str]:
        """The elements of an array, or one text. Of a variable that nobody sets, its name."""
        parsed = _VARIABLE.fullmatch(_source(node))
        if parsed is None:
            return [f"{COMPUTED}{_source(node).strip('${}')})"]
        name, index, action = parsed[1], parsed[2], parsed[3] or ""
        whole = index in ("@", "*")
        values = [] if name in "@*" else self.values.get(name, [])
        values = values if whole else values[int(index or 0) :][:1]
        is_empty = not values or (action.startswith(":") and values == [""])
        if action and "?" not in action and ("+" in action) is not is_empty:
            after = next(child.end_byte for child in node.children if child.type == action) - node.start_byte
            return [" ".join(self._joined(node, after, -1, quoted=True))]
        if values or whole or name in "@*" or "+" in action:
            return values
        return [""] if name in self.values else [f"{COMPUTED}{name})" if name.isdigit() else f"{UNSET}{name}}}"]

    def _sum(self, node: Node) -> int:
        match node.type:
            case "binary_expression":
                left, sign, right = node.children
                return _SUMS[sign.type](self._sum(left), self._sum(right))
            case "parenthesized_expression" | "arithmetic_expansion":
                return self._sum(node.named_children[0])
            case "variable_name":
                return int(self.values[_source(node)][0])
        return int(self._text(node))

    def _load(self, name: str) -> None:
        """Takes the file's variables and arrays. `$(dirname "$0")/models/x.sh` is looked for beside the script."""
        tail = Path(re.split(r"[)}]/*", name)[-1].lstrip("/"))
        near = [self.path.parent / tail, self.path.parent.parent / tail, self.path.parent.joinpath(*tail.parts[-2:])]
        file = next((file for file in (Path(name), *near) if isfile(file)), None)
        if file is None:
            self.missing.append(str(tail))
        else:
            replace(self, path=file).read(script_text(file))


def read_script(path: Path, environment: Mapping[str, str]) -> Script:
    """Raises InvalidArgument for a file that is no script, and FailedPrecondition where tree-sitter is missing."""
    script = Script(path, {name: [value] for name, value in environment.items()})
    script.read(script_text(path))
    return script


def script_text(path: Path) -> str:
    """Raises InvalidArgument for what is no text, or more than a script has."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    if len(text) > _MAX_BYTES:
        raise InvalidArgument(f"{path} has more than {_MAX_BYTES} bytes, so it is no script that starts a training")
    return text


def is_computed(text: str) -> bool:
    """Whether only a run, or another environment, knows the value."""
    return COMPUTED in text or UNSET in text


def _parsed(text: str) -> Node:
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError as error:
        raise FailedPrecondition("tree-sitter reads bash: pip install 'headrace[migrate]'") from error
    return Parser(Language(language())).parse(text.encode()).root_node


def _source(node: Node) -> str:
    """A node's text: the parser counts the blanks before a variable in quotes to it."""
    return (node.text or b"").decode(errors="replace").lstrip()


def _behind_redirections(nodes: Sequence[Node]) -> list[Node]:
    """Arguments behind `> file`, which the parser counts to the redirection."""
    files = [[word for word in file.named_children if word.type != "file_descriptor"] for file in nodes]
    return [word for words in files for word in words[1:] if not word.type.startswith("heredoc")]


def _literal(node: Node, start: int, end: int | None) -> list[str]:
    escaped = _ESCAPED_IN_QUOTES if node.type == "string" else _ESCAPED
    text = escaped.sub(lambda mark: mark[1].strip("\n"), (node.text or b"")[start:end].decode(errors="replace"))
    return [text] if text else []
