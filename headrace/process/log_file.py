"""The log file of a process: each start appends to it, and what one start wrote is read for a person.

A person waits for the process or asks why it ended. At MAX_BYTES a start begins a new file, and the full one is kept as
NAME.log.1, in the place of the one before: a process that keeps restarting fills no disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from headrace.limits import object_of_line

MAX_BYTES = 64 << 20
_TAIL_BYTES = 65_536
_NOISE = re.compile(r"\b(User|Future|Deprecation)Warning: |^\s*(warnings\.)?warn\($")
"""What packages say on import of others that are not installed: never why a service ended."""
_SECONDHAND = "PEER_LOST"


def open_log(file: Path) -> FileIO:
    """Opens the log for one start of its process; `tell()` is where this start's part begins.

    A line with the time separates it from the part of the start before.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.stat().st_size > MAX_BYTES:
        file.replace(file.with_name(f"{file.name}.1"))
    log = file.open("ab", buffering=0)
    if log.tell():
        _try_to_write(log, f"\n---- started again at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC ----\n".encode())
    return log


def _try_to_write(log: FileIO, line: bytes) -> None:
    with suppress(OSError):  # a full disk must not keep a service from its start
        log.write(line)


def last_lines(file: Path, count: int, start: int = 0) -> list[str]:
    """Returns the last lines of a log from byte `start` on, without warnings of imports."""
    return _lines(file, start)[-count:] if file.is_file() else []


def tail(file: Path, lines: int = 20, start: int = 0) -> str:
    """Returns the last lines of a log from byte `start` on, indented and without warnings of imports.

    A text of several lines in a JSON line, such as the end of an engine's log, is shown as lines below it.
    """
    if not file.is_file():
        return "    (no log)"
    shown = [part for line in last_lines(file, lines, start) for part in _unfolded(line)]
    return "\n".join(f"    {line}" for line in shown) or "    (empty log)"


def last_error(file: Path, start: int) -> str | None:
    """The service's last error; with several ranks, the error of the rank that failed first and not of its peers."""
    errors = [event for event in _events(file, start) if str(event.get("event")).endswith("_failed") and _said(event)]
    firsthand = [event for event in errors if event.get("level") == "error" and event.get("reason") != _SECONDHAND]
    return _said(firsthand[0]) if firsthand else None


def last_words(name: str, file: Path, start: int) -> str:
    """The service's last message to a person: the last line that begins with its name, and the indented lines below."""
    lines = _lines(file, start)
    starts = [i for i, line in enumerate(lines) if line.startswith(f"{name}: ")]
    if not starts:
        return tail(file, start=start)
    first, *rest = lines[starts[-1] :]
    return "\n".join([first, *takewhile(lambda line: line.startswith("  "), rest)])


def doing(file: Path, start: int) -> str:
    """The last event that the service logged, in words; empty when it has logged none."""
    events = [str(event["event"]) for event in _events(file, start) if "event" in event]
    return events[-1].replace("_", " ") if events else ""


def _unfolded(line: str) -> list[str]:
    event = object_of_line(line)
    texts = {key: value for key, value in (event or {}).items() if isinstance(value, str) and "\n" in value}
    if event is None or not texts:
        return [line]
    rest = json.dumps({key: value for key, value in event.items() if key not in texts})
    return [rest, *(f"  {part}" for key, text in texts.items() for part in f"{key}: {text}".splitlines())]


def _said(event: Mapping[str, Any]) -> str:
    return str(event.get("error") or event.get("message") or "")


def _events(file: Path, start: int) -> Iterator[Mapping[str, Any]]:
    for line in _lines(file, start) if file.is_file() else ():
        if (event := object_of_line(line)) is not None:
            yield event


def _lines(file: Path, start: int) -> list[str]:
    with file.open("rb") as log:
        log.seek(max(start, file.stat().st_size - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return [line for line in text.splitlines() if not _NOISE.search(line)]
