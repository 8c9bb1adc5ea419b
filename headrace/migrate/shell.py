"""Reads a bash script that starts a training, without running it: variables, arrays, conditions, and commands' words.

A value that bash would compute when the script runs (a command, an argument, a variable of another machine) keeps its
text, so that it can be reported: `$(nproc)`, `${BASE_DIR}`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import InvalidArgument
from headrace.limits import syntax_tree
from headrace.migrate.bash_words import Part, Word, bash_tokens, quoted_parts

COMPUTED = "$("
"""A value that the script computes has this in it."""
UNSET = "${"
"""A value that has a variable in it that neither the script nor the environment sets."""
DECIDED_LATER = "\0"
"""Begins the words of a branch or loop of which only a run can say whether it is taken."""

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 8
_ASSIGNED = re.compile(r"^(\w+)(\+?)=")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_READS = {"read": -1, "mapfile": -1, "readarray": -1, "printf": 2}
"""Commands that set the variable whose name is this word of them."""
_VARIABLE = re.compile(r"^(\w+)(?:\[(@|\*|\d+)\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
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
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class _Block:
    """An if, a loop or a case. `runs` is None where only a run can say."""

    runs: bool | None
    taken: bool | None = False
    """Whether an earlier branch of the if was taken."""


@dataclass
class Script:
    """What a script has set and started, in its order."""

    path: Path
    environment: Mapping[str, str]
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that it reads and that are not here."""
    unjoined: list[str] = field(default_factory=list)
    """Flags that begin a line, because the line before has no backslash: they are added to its command."""
    blocks: list[_Block] = field(default_factory=list)
    depth: int = 0

    def read(self, text: str) -> None:
        """Takes a script's text, or that of a string which it runs."""
        if self.depth >= _MAX_DEPTH:
            raise InvalidArgument(f"{self.path} reads files or strings more than {_MAX_DEPTH} deep")
        self.depth += 1
        guard: bool | None = True
        for words, end in _statements(text):
            if guard is not True:
                self.blocks.append(_Block(guard))
            result = self._statement(words, end)
            if guard is not True and self.blocks:
                self.blocks.pop()
            guard = _guard(result, end)
        self.depth -= 1

    @property
    def _runs(self) -> bool | None:
        states = [block.runs for block in self.blocks]
        return False if False in states else None if None in states else True

    def _statement(self, words: list[Word], end: str) -> bool | None:
        """Its result, for && and ||: of a test whether it holds, and True of any other command."""
        while words:
            match words[0].plain:
                case "then" | "do" | "{" | "}" | "!" | "time" | "nohup" | "exec" | "command" | "sudo":
                    words = words[1:]
                case "if":
                    self.blocks.append(_Block(None if end in ("&&", "||") else self._holds(words[1:])))
                    return True
                case "elif" | "else":
                    self._branch(words[1:] if words[0].plain == "elif" else None)
                    words = [] if words[0].plain == "elif" else words[1:]
                case "for" | "while" | "until" | "select" | "case":
                    self.blocks.append(_Block(None))
                    return True
                case "fi" | "done" | "esac":
                    if self.blocks:
                        self.blocks.pop()
                    words = words[1:]
                case _:
                    return self._command(words) if self._runs is not False and end not in ("(", ")") else True
        return True

    def _branch(self, condition: list[Word] | None) -> None:
        if not self.blocks:
            return
        block = self.blocks[-1]
        if block.taken is not True:
            block.taken = True if block.runs is True else None if None in (block.runs, block.taken) else False
        holds = True if condition is None else self._holds(condition)
        block.runs = False if block.taken or holds is False else None if block.taken is None else holds

    def _command(self, words: list[Word]) -> bool | None:
        name = words[0].plain
        if name in ("[", "[[", "test"):
            return self._holds(words)
        assigned = words[1:] if name in _DECLARES else words
        if all(_ASSIGNED.match(word.head) or word.plain.startswith("-") for word in assigned) and assigned:
            for word in assigned:
                self._assign(word)
            return True
        while words and _ASSIGNED.match(words[0].head):
            words = words[1:]
        self._run([text for word in words for text in self.expand(word)])
        return True

    def _run(self, words: list[str]) -> None:
        match words:
            case ["source" | ".", file, *_]:
                self._load(file)
            case ["unset", *names]:
                self.values = {name: value for name, value in self.values.items() if name not in names}
            case ["eval", *strings]:
                self.read(" ".join(strings))
            case [name, *_] if name in _READS and len(words) > abs(_READS[name]):
                self.values[words[_READS[name]]] = f"{COMPUTED}{name})"
            case [name, *_] if name.startswith("--") and self.commands:
                self.commands[-1] += words
                self.unjoined.append(name)
            case [_, *_]:
                self.commands.append(words)

    def _assign(self, word: Word) -> None:
        head = _ASSIGNED.match(word.head)
        if head is None:
            return
        name, appends, certain = head[1], bool(head[2]), self._runs is True
        if word.array is not None:
            texts = [text for inner in word.array.words for text in self.expand(inner)]
            marked = (
                texts if certain else [text if text[:1] == DECIDED_LATER else DECIDED_LATER + text for text in texts]
            )
            self.arrays[name] = [*(self.arrays.get(name, []) if appends or not certain else []), *marked]
            return
        value = "".join(self._text(part) for part in word.after(head.end()))
        if not certain and self.values.get(name) != value:
            value = f"{COMPUTED}{name})"
        self.values[name] = self.values.get(name, "") + value if appends and certain else value

    def _holds(self, words: Sequence[Word]) -> bool | None:
        """Whether a test of strings or numbers holds; None for any other."""
        texts = [" ".join(self.expand(word, splits=False)) for word in words]
        if texts[:1] not in (["["], ["[["], ["test"]) or any(COMPUTED in text or UNSET in text for text in texts):
            return None
        match texts[1 : len(texts) - (texts[0] != "test")]:
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

    def expand(self, word: Word, *, splits: bool = True) -> list[str]:
        """The words that bash would make of it."""
        texts, opened = [""], False
        for part in word.parts:
            pieces = self._pieces(part, splits=splits)
            opened = opened or (bool(pieces) and (part.quoted or part.kind == "text"))
            if pieces:
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return texts if opened or texts != [""] else []

    def _pieces(self, part: Part, *, splits: bool) -> list[str]:
        if part.kind == "variable":
            if part.text in ("@", "*"):
                return []
            if (name := part.text.removesuffix("[@]").removesuffix("[*]")) != part.text:
                return self.arrays.get(name, [])
        text = self._text(part)
        if part.kind == "variable" and not part.quoted and splits and COMPUTED not in text and UNSET not in text:
            return text.split()
        return [text]

    def _text(self, part: Part) -> str:
        match part.kind:
            case "variable":
                return self._variable(part.text)
            case "sum":
                return self._sum(part.text)
            case "command":
                return f"{COMPUTED}{part.text.strip()})"
        return part.text

    def _variable(self, expression: str) -> str:
        parsed = _VARIABLE.match(expression)
        if parsed is None:
            return f"{COMPUTED}{expression})"
        name, index, action, default = parsed.groups()
        value = self._value(name, index)
        empty = value is None or (not value and action is not None and action.startswith(":"))
        if action is not None and action.endswith("+"):
            return "" if empty else self._default(default)
        if not empty and value is not None:
            return value
        if action is not None and not action.endswith("?"):
            return self._default(default)
        return f"{COMPUTED}{name})" if name.isdigit() else f"{UNSET}{name}}}"

    def _default(self, text: str) -> str:
        return "".join(self._text(part) for part in quoted_parts(text.strip("\"'")))

    def _value(self, name: str, index: str | None) -> str | None:
        if index is not None and name in self.arrays:
            values = self.arrays[name]
            return " ".join(values) if index in "@*" else values[int(index)] if int(index) < len(values) else ""
        return self.values.get(name, self.environment.get(name))

    def _sum(self, text: str) -> str:
        named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: self._variable(name[1]), text)
        try:
            return str(_sum(syntax_tree(named.strip()).body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return f"{COMPUTED}({text}))"

    def _load(self, name: str) -> None:
        """Takes the file's variables and arrays. `$(dirname "$0")/models/x.sh` is looked for beside the script."""
        tail = Path(re.split(r"[)}]/*", name)[-1].lstrip("/"))
        near = [self.path.parent / tail, self.path.parent.parent / tail, self.path.parent.joinpath(*tail.parts[-2:])]
        file = next((file for file in (Path(name), *near) if file.is_file()), None)
        if file is None:
            self.missing.append(str(tail))
        else:
            inner = replace(self, path=file)
            inner.read(script_text(file))
            self.values = inner.values


def read_script(path: Path, environment: Mapping[str, str]) -> Script:
    """Raises InvalidArgument for a file that is no script."""
    script = Script(path, environment)
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


def command_of(script: Script, *programs: str) -> list[str] | None:
    """The last command that has one of `programs`, from there on. A string of `bash -c` is looked into."""
    for words in reversed(script.commands):
        for number, word in enumerate(words):
            if any(word == program or word.endswith(f"/{program}") for program in programs):
                return words[number:]
            if any(program in word for program in programs) and len(word.split()) > 1 and script.depth < _MAX_DEPTH:
                inner = replace(script, commands=[], depth=script.depth + 1)
                inner.read(word)
                return command_of(inner, *programs)
    return None


def _statements(text: str) -> Iterator[tuple[list[Word], str]]:
    words: list[Word] = []
    for token in bash_tokens(text):
        if isinstance(token, Word):
            words.append(token)
        else:
            if words:
                yield words, token
            words = []
    if words:
        yield words, "\n"


def _guard(result: bool | None, end: str) -> bool | None:
    """Whether the next statement runs."""
    match end:
        case "&&":
            return result
        case "||":
            return None if result is None else not result
    return True


def _sum(body: Sequence[ast.stmt]) -> int:
    match body:
        case [ast.Expr(value)]:
            return _number(value)
    raise ValueError("no sum")


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return -_number(operand)
        case ast.BinOp(left, sign, right) if type(sign) in _SUMS:
            return _SUMS[type(sign)](_number(left), _number(right))
    raise ValueError("no sum of whole numbers")
