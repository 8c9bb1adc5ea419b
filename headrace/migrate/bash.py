"""Reads a bash script that starts a training, without running it: variables, arrays, conditions, and commands' words.

tree-sitter parses it. A value that bash would compute when the script runs (a command, an argument, a variable of
another machine) keeps its text, so that it can be reported: `$(nproc)`, `${BASE_DIR}`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
_MAX_DEPTH = 8
_VARIABLE = re.compile(r"\$\{?(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?]).*)?\}?", re.DOTALL)
_ESCAPED, _ESCAPED_IN_QUOTES = re.compile(r"\\(.)", re.DOTALL), re.compile(r'\\(["\\$`\n])')
_REPLACED = ("simple_expansion", "expansion")
_NOT_LITERAL = (*_REPLACED, "command_substitution", "arithmetic_expansion", "concatenation", "string", "raw_string")
_CLAUSES = ("elif_clause", "else_clause")
_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
}
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
    certain: bool = True
    """Whether what is read now runs for sure."""
    depth: int = 0

    def read(self, text: str) -> None:
        """Takes a script's text, or that of a string which it runs."""
        if self.depth >= _MAX_DEPTH:
            raise InvalidArgument(f"{self.path} reads files or strings more than {_MAX_DEPTH} deep")
        self.depth += 1
        try:
            self._run(_parsed(text))
        except RecursionError as error:
            raise InvalidArgument(f"{self.path} has brackets too deep inside of each other") from error
        self.depth -= 1

    def command_of(self, *programs: str) -> list[str] | None:
        """The last command that has one of `programs`, from there on. A string of `bash -c` is looked into."""
        for words in reversed(self.commands):
            for number, word in enumerate(words):
                if any(word == program or word.endswith(f"/{program}") for program in programs):
                    return words[number:]
                if any(program in word for program in programs) and len(word.split()) > 1 and self.depth < _MAX_DEPTH:
                    inner = replace(self, commands=[], depth=self.depth + 1)
                    inner.read(word)
                    return inner.command_of(*programs)
        return None

    def _run(self, node: Node) -> bool | None:
        """Its result: of a test whether it holds, None where only a run can say, and True of anything else."""
        children = node.named_children
        match node.type:
            case "command":
                return self._command(node)
            case "redirected_statement" if children[:1] and children[0].type == "command":
                return self._command(children[0], [word for file in children[1:] for word in _after_redirection(file)])
            case "variable_assignment":
                self._assign(node)
            case "test_command":
                return self._run(children[0]) if children else None
            case "list" | "binary_expression" if node.children[1].type in ("&&", "||"):
                left, either, right = self._run(node.children[0]), node.children[1].type == "||", node.children[2:]
                after = self._branch(_not(left) if either else left, right)
                return left if left is either or left is None else after
            case "binary_expression" | "unary_expression" | "word" | "string" | "raw_string" | "expansion":
                return self._holds(node)
            case "negated_command":
                return _not(self._run(children[0]))
            case "if_statement":
                reachable: bool | None = True
                for clause in (node, *(child for child in node.children if child.type in _CLAUSES)):
                    reachable = self._clause(clause, reachable)
            case "for_statement" | "c_style_for_statement" | "while_statement" | "case_statement":
                self._branch(None, [child for child in children if child.type.endswith(("_group", "_item"))])
            case "compound_statement" if node.children[0].type == "((":
                return None
            case "comment" | "heredoc_redirect":
                pass
            case _:
                self._branch(True, children)
        return True

    def _branch(self, runs: bool | None, nodes: Sequence[Node]) -> bool | None:
        if runs is False:
            return False
        certain, self.certain = self.certain, self.certain and runs is True
        result: bool | None = True
        for node in nodes:
            result = self._run(node)
        self.certain = certain
        return result

    def _clause(self, clause: Node, reachable: bool | None) -> bool | None:
        """Returns whether the next clause of an if can be reached."""
        types = [child.type for child in clause.children]
        then = types.index("then") if "then" in types else 0
        conditions = [child for child in clause.children[:then] if child.is_named]
        holds = self._run(conditions[0]) if len(conditions) == 1 and _is_test(conditions[0]) else None
        holds = True if clause.type == "else_clause" else holds
        body = [child for child in clause.children[then + 1 :] if child.type not in _CLAUSES]
        self._branch(_and(reachable, holds), body)
        return _and(reachable, _not(holds))

    def _command(self, node: Node, more: Sequence[Node] = ()) -> bool | None:
        own = [child.children[0] if child.type == "command_name" else child for child in node.named_children]
        nodes = [child for child in (*own, *more) if not child.type.endswith(("_assignment", "_redirect"))]
        words = [word for argument in nodes for word in self._words(argument)]
        match words:
            case ["source" | ".", file, *_]:
                self._load(file)
            case ["eval", *strings]:
                self.read(" ".join(strings))
            case ["test", *_]:
                return None
            case [name, *_] if name.startswith("--") and self.commands:
                self.commands[-1] += words
                self.unjoined.append(name)
            case [_, *_]:
                self.commands.append(words)
        return True

    def _assign(self, node: Node) -> None:
        name, value = _source(node.children[0]), node.child_by_field_name("value")
        before, appends = self.values.get(name, []), node.children[1].type == "+="
        if value is not None and value.type == "array":
            words = [word for child in value.named_children if child.type != "comment" for word in self._words(child)]
            if not self.certain:
                words = [DECIDED_LATER + word.removeprefix(DECIDED_LATER) for word in words]
            self.values[name] = [*(before if appends or not self.certain else []), *words]
            return
        text = "".join([*(before[:1] if appends else []), "" if value is None else self._text(value)])
        self.values[name] = [text if self.certain or [text] == before else f"{COMPUTED}{name})"]

    def _holds(self, node: Node) -> bool | None:
        """Whether a test of strings or numbers holds; None for any other."""
        texts = [_source(child) if child.type == "test_operator" else self._text(child) for child in node.children]
        texts = texts if node.type.endswith("_expression") else [self._text(node)]
        if any(COMPUTED in text or UNSET in text or "*" in text for text in texts):
            return None
        match texts:
            case ["!", _]:
                return _not(self._run(node.children[1]))
            case ["-n", text] | [text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case [left, test, right] if test in _TESTS:
                try:
                    return _TESTS[test](left, right)
                except ValueError:
                    return None
        return None

    def _words(self, node: Node) -> list[str]:
        """The words that bash makes of an argument."""
        texts, quoted = [""], False
        for part in node.children if node.type == "concatenation" else [node]:
            whole = part.type == "string" and len(part.children) == 3 and part.children[1].type in _REPLACED
            inner = part.children[1] if whole else part
            pieces = self._values(inner) if inner.type in _REPLACED else [self._text(part)]
            if inner is part and part.type in _REPLACED and not re.search(r"\[[@*]\]", _source(part)):
                pieces = [word for text in pieces for word in ([text] if _is_computed(text) else text.split())]
            if pieces:
                quoted = quoted or part.type not in _REPLACED
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return texts if quoted or texts != [""] else []

    def _text(self, node: Node) -> str:
        """The value of an argument that is not split into words."""
        source = _source(node)
        blank = source[: len(source) - len(source.lstrip())]
        match node.type:
            case "raw_string":
                return source[1:-1]
            case "ansi_c_string":
                return source[2:-1]
            case "string":
                return self._joined(node, 1, -1)
            case "concatenation":
                return "".join(map(self._text, node.children))
            case "simple_expansion" | "expansion":
                return blank + " ".join(self._values(node))
            case "command_substitution":
                return f"{blank}{COMPUTED}{source.strip().strip('`').removeprefix('$(').removesuffix(')')})"
            case "arithmetic_expansion":
                try:
                    return blank + str(self._sum(node))
                except (ArithmeticError, LookupError, ValueError):
                    return source
        return _unescaped(source, _ESCAPED)

    def _joined(self, node: Node, start: int, end: int) -> str:
        """A stretch of a node: what is replaced in it, and the text between."""
        source, text = node.text or b"", ""
        escaped = _ESCAPED_IN_QUOTES if node.type == "string" else _ESCAPED
        for child in node.named_children:
            first = child.start_byte - node.start_byte
            if child.type in _NOT_LITERAL and first >= start:
                text += _unescaped(source[start:first].decode(), escaped) + self._text(child)
                start = child.end_byte - node.start_byte
        return text + _unescaped(source[start:end].decode(), escaped)

    def _values(self, node: Node) -> list[str]:
        """The elements of an array, or one text. Of a variable that nobody sets, its name."""
        source = _source(node).strip()
        parsed = _VARIABLE.fullmatch(source)
        if parsed is None:
            return [f"{COMPUTED}{source.strip('${}')})"]
        name, index, action = parsed.groups()
        if name in "@*":
            return []
        values = self.values.get(name, [])
        values = values if index in ("@", "*") else values[int(index or 0) :][:1]
        is_empty = not values or ((action or "").startswith(":") and values == [""])
        if action and "?" not in action and ("+" in action) is not is_empty:
            after = next(child.end_byte for child in node.children if child.type == action) - node.start_byte
            return [self._joined(node, after, -1)]
        if values or index in ("@", "*") or (action and "+" in action):
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
        file = next((file for file in (Path(name), *near) if file.is_file()), None)
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


def _parsed(text: str) -> Node:
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError as error:
        raise FailedPrecondition("tree-sitter reads bash: pip install 'headrace[migrate]'") from error
    return Parser(Language(language())).parse(text.encode()).root_node


def _source(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _after_redirection(file: Node) -> list[Node]:
    """The arguments behind `> file`, which the parser counts to it."""
    words = [child for child in file.named_children if child.type != "file_descriptor"]
    return words[1:] if file.type == "file_redirect" else []


def _unescaped(text: str, escaped: re.Pattern[str]) -> str:
    return escaped.sub(lambda found: found[1].strip("\n"), text)


def _is_computed(text: str) -> bool:
    return COMPUTED in text or UNSET in text


def _is_test(node: Node) -> bool:
    """Whether it is made of tests alone."""
    if node.type in ("list", "negated_command"):
        return all(map(_is_test, node.named_children))
    return node.type == "test_command"


def _not(result: bool | None) -> bool | None:
    return None if result is None else not result


def _and(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else None if None in (left, right) else True
