"""Reads a bash script that starts a training, without running it: variables, arrays, and the words of its command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import InvalidArgument

COMPUTED = "$("
"""A value that the script computes when it runs has this in it: it is reported, and never guessed."""

_MAX_BYTES = 1 << 20
_ASSIGNED = re.compile(r"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)$", re.DOTALL)
_ARRAY_BEGINS = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*)?\w+\+?=\(")
_USED = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
_WHOLE_ARRAY = re.compile(r"^\$\{(\w+)\[[@*]\]\}$")
_ONE_VARIABLE = re.compile(r"^\$\{?(\w+)\}?$")
_LOADED = ("source", ".")


@dataclass
class Script:
    """The variables and arrays of a script as they are at its end, and its commands as words."""

    path: Path
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that it reads and that are not here."""

    def expanded(self, words: Sequence[str]) -> list[str]:
        """Words with variables and arrays in place. What cannot be known keeps a `$(`."""
        return [part for word in words for part in self._expand(word)]

    def _expand(self, word: str) -> list[str]:
        if found := _WHOLE_ARRAY.match(word):
            return self.expanded(self.arrays.get(found[1], []))
        text = _USED.sub(lambda used: self._value(used), word)
        if _ONE_VARIABLE.match(word) and "--" in text and COMPUTED not in text:
            return shlex.split(text)  # flags in one variable, which bash divides at spaces
        return [text]

    def _value(self, used: re.Match[str]) -> str:
        name, default = used[1] or used[3], used[2]
        if name in self.values:
            return self.values[name]
        return default if default is not None else f"{COMPUTED}{name})"


def read_script(path: Path) -> Script:
    """Raises InvalidArgument for a file that is no script."""
    script = Script(path)
    _read(script, path)
    return script


def command_of(script: Script, *programs: str) -> list[str] | None:
    """The words behind the first of `programs` in the last command that has one; arrays and variables are in place."""
    for command in reversed(script.commands):
        words = script.expanded(command)
        for number, word in enumerate(words):
            if any(word == program or word.endswith(f"/{program}") for program in programs):
                return words[number:]
    return None


def _read(script: Script, path: Path) -> None:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    if len(text) > _MAX_BYTES:
        raise InvalidArgument(f"{path} has more than {_MAX_BYTES} bytes, so it is no script that starts a training")
    for statement in _statements(text):
        _take(script, statement)


def _statements(text: str) -> Iterator[str]:
    """Logical lines: continued ones, open quotes and open arrays are joined."""
    pending = ""
    for line in text.splitlines():
        if not pending and line.lstrip().startswith("#"):
            continue
        pending = f"{pending[:-1]} {line}" if pending.endswith("\\") else f"{pending}\n{line}" if pending else line
        if pending.endswith("\\") or _is_open(pending):
            continue
        yield pending.strip()
        pending = ""
    if pending:
        yield pending.strip()


def _is_open(text: str) -> bool:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return True
    return bool(_ARRAY_BEGINS.match(text)) and not (words and words[-1].endswith(")"))


def _take(script: Script, statement: str) -> None:
    try:
        words = shlex.split(statement, comments=True)
    except ValueError:
        return  # a here-document or another form that has no words
    if not words:
        return
    if words[0] in _LOADED and len(words) > 1:
        _load(script, script.expanded(words[1:2])[0])
    elif _ARRAY_BEGINS.match(statement):
        _take_array(script, statement)
    elif (found := _ASSIGNED.match(statement)) and len(words) <= 1 + statement.startswith(("export", "local")):
        value = _ASSIGNED.match(words[-1])
        text = "".join(script.expanded([value[3]])) if value else ""
        script.values[found[1]] = script.values.get(found[1], "") + text if found[2] else text
    else:
        script.commands.append(words)


def _take_array(script: Script, statement: str) -> None:
    head, _, rest = statement.partition("=(")
    name, appends = head.split()[-1].removesuffix("+"), head.endswith("+")
    words = shlex.split(rest.rstrip().removesuffix(")"), comments=True)
    known = script.arrays.get(name, []) if appends else []
    script.arrays[name] = [*known, *script.expanded(words)]


def _load(script: Script, name: str) -> None:
    """Takes the file's variables and arrays too. `$(dirname "$0")/models/x.sh` is looked for beside the script."""
    tail = name.rpartition(")")[2].lstrip("/")
    for place in (Path(name), script.path.parent / tail, script.path.parent.parent / tail):
        if place.is_file():
            _read(script, place)
            return
    script.missing.append(tail or name)
