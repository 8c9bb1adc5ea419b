"""The trainer's record, read: which samples went into which step, line by line.

A step that was run again has a later line. The last line of a step is the one whose weights live on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import NotFound
from headrace.ledger_tools.audit.finding import Finding

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEGINNING = '{"step": '
_CUT_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,4})?$")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class RecordLine:
    """One line, parsed. Lines are counted from 1."""

    number: int
    step: int
    digest: str
    sample_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Record:
    """The lines that can be read, in order, and what is wrong with the others."""

    lines: Sequence[RecordLine] = ()
    findings: Sequence[Finding] = ()
    last_lines: Mapping[int, RecordLine] = field(init=False)
    """The last line of every step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_lines", {line.step: line for line in self.lines})


def parse_record(lines: Iterable[bytes]) -> Record:
    """A line that a kill has cut is passed over: its step was never consumed."""
    good: list[RecordLine] = []
    findings: list[Finding] = []
    for number, data in enumerate(lines, 1):
        text = data.decode(errors="replace").removesuffix("\n")
        if _is_torn(text):
            continue
        try:
            good.append(_parse(number, text))
        except ValueError as error:
            findings.append(Finding("record", f"line {number} {error}: {text[:_SHOWN_CHARACTERS]!r}"))
    return Record(good, findings)


def read_record(path: Path) -> Record:
    """`parse_record` of a file. Raises NotFound."""
    if not path.is_file():
        raise NotFound(f"{path} does not exist: the trainer writes it with its first step, nothing was trained yet")
    with path.open("rb") as lines:
        return parse_record(lines)


def _parse(number: int, text: str) -> RecordLine:
    """Raises ValueError that says what the line is not."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("is not an object with step, digest and sample_ids")
    step, digest, sample_ids = row.get("step"), row.get("digest"), row.get("sample_ids")
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise ValueError("has no step, a number from 0 on")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("has no digest of 64 hexadecimal characters")
    if not isinstance(sample_ids, list) or not sample_ids or not all(isinstance(each, str) for each in sample_ids):
        raise ValueError("has no list of sample_ids")
    return RecordLine(number, step, digest, sample_ids)


def _is_torn(text: str) -> bool:
    """True when a kill may have left this: the beginning of a line as the trainer writes it, without its end."""
    if not text.strip("\0"):
        return True  # the file had grown, and its bytes had not reached the disk
    if len(text) < len(_BEGINNING):
        return _BEGINNING.startswith(text)
    if not text.startswith(_BEGINNING):
        return False
    text = _CUT_ESCAPE.sub("", text)
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip(" ,")) or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False
