"""Writes the page with a run's data beside it: a folder that opens as a file, is copied, or is put on a web server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.errors import FailedPrecondition
from headrace.view.data import LedgerCounts, RunData, Value, script, step_name

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
DATA = "data"
TOKEN_BYTES = 512 << 20
"""Of all scripts with tokens; the newest steps have theirs."""


def write_page(
    data: RunData, ledger: LedgerCounts | None, target: Path, report: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Returns how many bytes were written. `report` is given how many steps are written, and of how many.

    Raises FailedPrecondition for a folder that holds something else.
    """
    _require_own(target)
    shutil.rmtree(target / DATA, ignore_errors=True)
    (target / DATA).mkdir(parents=True)
    num_bytes = sum(_copy(file, target) for file in sorted(STATIC.iterdir()))
    left, notes = TOKEN_BYTES, list[str]()
    steps, with_tokens = data.log.steps(), set(data.log.steps_with_tokens())
    for done, step in enumerate(reversed(steps)):
        report(done, len(steps))
        has_tokens = False
        if left > 0 and step in with_tokens:
            written = _write(target, step_name("tokens", step), data.tokens(step))
            num_bytes, left, has_tokens = num_bytes + written, left - written, True
        num_bytes += _write(target, step_name("step", step), data.step(step, has_tokens=has_tokens))
        if left <= 0 and not notes:
            notes.append(f"Tokens of steps before {step} are left out: a page has {TOKEN_BYTES >> 20} MiB of them.")
    for name, value in _others(data):
        num_bytes += _write(target, name, value)
    num_bytes += _write(target, "overview", data.overview(ledger, notes))
    report(len(steps), len(steps))
    return num_bytes


def _others(data: RunData) -> Iterator[tuple[str, Value]]:
    for step in data.log.evaluations():
        yield step_name("eval", step), data.evaluation(step)
    yield "untrained", data.untrained()
    yield "prompts", data.prompts()


def _require_own(target: Path) -> None:
    """A folder that is empty, or has an earlier page."""
    if target.is_dir() and any(target.iterdir()) and not (target / DATA / "overview.js").is_file():
        raise FailedPrecondition(f"{target} has files that are no page of headrace view: name an empty folder")


def _copy(file: Path, target: Path) -> int:
    shutil.copyfile(file, target / file.name)
    return file.stat().st_size


def _write(target: Path, name: str, value: Value) -> int:
    return (target / DATA / f"{name}.js").write_bytes(script(name, value))
