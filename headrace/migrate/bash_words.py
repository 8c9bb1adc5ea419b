"""Bash's words and operators, with what is quoted in them. Here-documents and redirections are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"<<<|<<-?\s*(['\"]?)(\w+)\1|[<>&]?>[>&|]?|<[<>&]?")
_NAME = re.compile(r"\w+|[@*#?!$-]")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word. A variable's text is what stands in its braces, a sum's and a command's in parentheses."""

    kind: Literal["text", "variable", "sum", "command"]
    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    words: Sequence[Word]


@dataclass(frozen=True, slots=True)
class Word:
    parts: Sequence[Part]
    array: Array | None = None

    @property
    def head(self) -> str:
        """Its text before anything that bash replaces."""
        first = self.parts[0] if self.parts else None
        return first.text if first and first.kind == "text" and not first.quoted else ""

    @property
    def plain(self) -> str:
        """Its text where it has nothing else, and nothing quoted."""
        return self.head if len(self.parts) == 1 else ""

    def after(self, length: int) -> Sequence[Part]:
        """Its parts without the first characters of its head."""
        return (Part("text", self.head[length:]), *self.parts[1:])


def bash_tokens(text: str) -> Iterator[Word | str]:
    """Words, and operators as text. An unclosed quote, brace or parenthesis ends at the end of the text."""
    reader = _Reader(text)
    while reader.at < len(text):
        token = reader.next()
        if token is not None:
            yield token


def quoted_parts(text: str) -> list[Part]:
    """The parts of a text in double quotes."""
    return _Reader(text).quoted(end="")


@dataclass
class _Reader:
    text: str
    at: int = 0
    documents: tuple[str, ...] = ()
    """The last lines of here-documents that begin after this line."""

    def next(self) -> Word | str | None:
        text = self.text
        if blank := re.compile(r"[ \t\r]+|\\\n|#[^\n]*").match(text, self.at):
            self.at = blank.end()
            return None
        if redirection := re.compile(rf"\d?(?:{_REDIRECTION.pattern})").match(text, self.at):
            self.at = redirection.end()
            if redirection[2]:
                self.documents = (*self.documents, redirection[2])
            else:
                self._skip_target()
            return None
        if text.startswith("((", self.at):
            inner = self._balanced("(", ")", 0)
            return Word((Part("sum", inner),))
        if found := _OPERATOR.match(text, self.at):
            self.at = found.end()
            if found[0] == "\n":
                self._skip_documents()
            return found[0]
        return self._word()

    def _skip_target(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if self.at < len(self.text) and not _OPERATOR.match(self.text, self.at):
            self._word()

    def _skip_documents(self) -> None:
        for last in self.documents:
            end = re.compile(rf"^\t*{last}$\n?", re.MULTILINE).search(self.text, self.at)
            self.at = end.end() if end else len(self.text)
        self.documents = ()

    def _word(self) -> Word:
        parts: list[Part] = []
        while self.at < len(self.text):
            mark = self.text[self.at]
            if mark in " \t\r\n;|<>)" or (mark == "&"):
                break
            if mark == "(":
                if parts and parts[-1].text.endswith("=") and not parts[-1].quoted:
                    return Word(_joined(parts), self._array())
                break
            parts += self._piece(mark)
        if not parts:  # a lone > or ) that no operator took
            self.at += 1
        return Word(_joined(parts))

    def _piece(self, mark: str) -> list[Part]:
        if mark == "'":
            end = self.text.find("'", self.at + 1)
            return [Part("text", self._until(self.at + 1, end, 1), quoted=True)]
        if mark == '"':
            self.at += 1
            return self.quoted(end='"') or [Part("text", "", quoted=True)]
        if mark == "`":
            return [Part("command", self._until(self.at + 1, self.text.find("`", self.at + 1), 1))]
        if mark == "$":
            return [self._dollar(quoted=False)]
        if mark == "\\":
            self.at += 2
            escaped = self.text[self.at - 1 : self.at]
            return [] if escaped == "\n" else [Part("text", escaped, quoted=True)]
        self.at += 1
        return [Part("text", mark)]

    def quoted(self, end: str) -> list[Part]:
        parts: list[Part] = []
        while self.at < len(self.text) and not (end and self.text[self.at] == end):
            mark = self.text[self.at]
            if mark == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(Part("text", self.text[self.at + 1].strip("\n"), quoted=True))
                self.at += 2
            elif mark == "$":
                parts.append(self._dollar(quoted=True))
            elif mark == "`":
                parts.append(
                    Part("command", self._until(self.at + 1, self.text.find("`", self.at + 1), 1), quoted=True)
                )
            else:
                parts.append(Part("text", mark, quoted=True))
                self.at += 1
        self.at += len(end)
        return _joined(parts)

    def _dollar(self, *, quoted: bool) -> Part:
        self.at += 1
        if self.text.startswith("((", self.at):
            return Part("sum", self._balanced("(", ")", 0).removeprefix("(").removesuffix(")"), quoted)
        if self.text.startswith("(", self.at):
            return Part("command", self._balanced("(", ")", 0), quoted)
        if self.text.startswith("{", self.at):
            return Part("variable", self._balanced("{", "}", 0), quoted)
        if not quoted and self.text.startswith("'", self.at):
            return Part("text", self._until(self.at + 1, self.text.find("'", self.at + 1), 1), quoted=True)
        if name := _NAME.match(self.text, self.at):
            short = name[0][:1] if name[0][0].isdigit() else name[0]
            self.at += len(short)
            return Part("variable", short, quoted)
        return Part("text", "$", quoted)

    def _balanced(self, opens: str, closes: str, depth: int) -> str:
        """What stands between a mark here and the one that closes it."""
        start = self.at + 1
        while self.at < len(self.text):
            depth += (self.text[self.at] == opens) - (self.text[self.at] == closes)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]
        return self.text[start:]

    def _array(self) -> Array:
        self.at += 1
        words: list[Word] = []
        while self.at < len(self.text):
            found = self.next()
            if found == ")":
                break
            if isinstance(found, Word):
                words.append(found)
        return Array(words)

    def _until(self, start: int, end: int, length: int) -> str:
        stop = len(self.text) if end < 0 else end
        self.at = stop + length
        return self.text[start:stop]


def _joined(parts: Sequence[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and part.kind == last.kind == "text" and part.quoted == last.quoted:
            joined[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return joined
