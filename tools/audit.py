"""`python -m tools.audit BIN`: known flaws of every version that `requirements/` pins; BIN has pip-audit.

OSV is asked, then PyPI for what OSV did not answer. Silence is not innocence: it ends with 0 only where a service
answered for every pin and knew no flaw, with 1 where there is a flaw, and with 2 where a pin was asked of nobody.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tools.pinned import Pin, files, pins_of

SERVICES = ("osv", "pypi")
_SECONDS = 900.0
_ANSWER_SECONDS = 15

Flaws = Mapping[Pin, Sequence[str]]
"""The flaws of each pin that was answered for: none of them, or an id and the versions that mend it."""


class Silent(Exception):
    """A service gave no answer. The message says why."""


def _ask(program: Path, service: str, pins: Sequence[Pin]) -> Flaws:
    """Runs pip-audit; pins of one package in several versions are asked one after the other."""
    answered: dict[Pin, Sequence[str]] = {}
    for turn in _turns(pins):
        answered |= _answers(_run(program, service, turn), turn)
    return answered


def _turns(pins: Sequence[Pin]) -> list[list[Pin]]:
    turns: list[dict[str, Pin]] = []
    for pin in pins:
        turn = next((turn for turn in turns if pin.name not in turn), None)
        if turn is None:
            turns.append(turn := {})
        turn[pin.name] = pin
    return [list(turn.values()) for turn in turns]


def _run(program: Path, service: str, pins: Iterable[Pin]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in pins)
        file.flush()
        words = (*("-s", service, "-r", file.name, "-f", "json"), "--no-deps", "--disable-pip")
        quiet = ("--progress-spinner", "off", "--timeout", str(_ANSWER_SECONDS))
        done = subprocess.run([program, *words, *quiet], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if not done.stdout.strip():
        raise Silent(" ".join(done.stderr.strip().splitlines()[-1:])[:300] or f"exit code {done.returncode}")
    return done.stdout


def _answers(text: str, pins: Iterable[Pin]) -> Flaws:
    """A package that was skipped is not answered for: pip-audit itself calls that no known vulnerability."""
    known = {pin.name: pin for pin in pins}
    return {
        known[canonicalize_name(each["name"])]: [_described(flaw) for flaw in each["vulns"]]
        for each in json.loads(text)["dependencies"]
        if "vulns" in each
    }


def _described(flaw: Mapping[str, Any]) -> str:
    mended = ", ".join(flaw["fix_versions"]) or "no version"
    return f"{flaw['id']} (mended in {mended})"


def main(binaries: Path) -> int:
    used: dict[Pin, list[str]] = {}
    for file in files():
        for pin in pins_of(file):
            used.setdefault(pin, []).append(file.name)
    answered: dict[Pin, Sequence[str]] = {}
    for service in SERVICES:
        if rest := [pin for pin in used if pin not in answered]:
            try:
                found = _ask(binaries / "pip-audit", service, rest)
                print(f"{service} answered for {len(found)} of {len(rest)} pins")
                answered |= found
            except Silent as silence:
                print(f"{service} did not answer: {silence}")
    num_flaws = sum(map(len, answered.values()))
    for pin, flaws in answered.items():
        for flaw in flaws:
            print(f"FLAW {pin.name} {pin.version}: {flaw}, in {', '.join(used[pin])}")
    print(f"{num_flaws} flaws are known of {len(answered)} of {len(used)} pins that a service answered for")
    unasked = len(used) - len(answered)
    if unasked:
        print(f"NOT AUDITED: {unasked} pins, of which no service said anything: run this with internet access")
    return 1 if num_flaws else 2 if unasked else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
