"""`python -m tools.audit BIN`: known flaws of every version that `requirements/` pins; BIN has pip-audit and safety-db.

OSV is asked, then PyPI for what OSV did not answer; what neither answered is compared with safety-db's list, which is
years old. Silence is not innocence: it ends with 0 only where a service answered for every pin and knew no flaw, with 1
where there is a flaw, and with 2 where a pin was asked of nobody.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from tools.pinned import Pin, files, pins_of

SERVICES = ("osv", "pypi")
_SECONDS = 900.0
_ANSWER_SECONDS = 15

Flaws = Mapping[Pin, Sequence[str]]
"""The flaws of each pin that was answered for: none of them, or an id and the versions that mend it."""
Ask = Callable[[str, Sequence[Pin]], Flaws]


class Silent(Exception):
    """A service gave no answer. The message says why."""


@dataclass(frozen=True, slots=True)
class OldList:
    """A list of flaws as a package: names, and versions that have them."""

    date: str
    entries: Mapping[str, Sequence[tuple[str, str]]]

    @classmethod
    def read(cls, text: str) -> OldList:
        """Reads safety-db's insecure_full.json."""
        tree: dict[str, Any] = json.loads(text)
        date = datetime.datetime.fromtimestamp(tree.pop("$meta")["timestamp"], datetime.UTC).date()
        entries: dict[str, list[tuple[str, str]]] = {}
        for name, found in tree.items():
            for each in found:
                of_name = entries.setdefault(canonicalize_name(name), [])
                of_name += [(each["cve"] or each["id"], specs) for specs in each["specs"]]
        return cls(str(date), entries)

    def flaws(self, pin: Pin) -> Sequence[str]:
        """The ids of those that the version has, and of those whose versions cannot be read."""
        return [name for name, versions in self.entries.get(pin.name, ()) if _may_have(pin.version, versions)]


def _may_have(version: str, versions: str) -> bool:
    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


def asked_of(binaries: Path) -> Ask:
    """Runs pip-audit once for each service; pins of one package in several versions are asked one after the other."""

    def ask(service: str, pins: Sequence[Pin]) -> Flaws:
        answered: dict[Pin, Sequence[str]] = {}
        for turn in _turns(pins):
            answered |= _answers(_run(binaries / "pip-audit", service, turn), turn)
        return answered

    return ask


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


def audit(used: Mapping[Pin, Sequence[str]], ask: Ask, old: OldList) -> tuple[int, str]:
    """The exit code, and the report. `used` says which files pin a version."""
    answered: dict[Pin, Sequence[str]] = {}
    lines = []
    for service in SERVICES:
        rest = [pin for pin in used if pin not in answered]
        if not rest:
            break
        try:
            found = ask(service, rest)
            lines.append(f"{service} answered for {len(found)} of {len(rest)} pins")
            answered |= found
        except Silent as silence:
            lines.append(f"{service} did not answer: {silence}")
    flaws = [f"{pin.name} {pin.version}: {flaw}" for pin, found in answered.items() for flaw in found]
    unasked = {pin: where for pin, where in used.items() if pin not in answered}
    flaws += [f"{p.name} {p.version}: {flaw} (list of {old.date})" for p in unasked for flaw in old.flaws(p)]
    lines += [f"FLAW {flaw}, in {', '.join(_files_of(used, flaw))}" for flaw in flaws]
    lines.append(f"{len(flaws)} flaws are known of {len(answered)} of {len(used)} pins that a service answered for")
    if unasked:
        lines.append(
            f"NOT AUDITED: {len(unasked)} pins, of which no service said anything. They were compared with a list of "
            f"{old.date}, which knows no later flaw: run this on a machine with internet access"
        )
    return (1 if flaws else 2 if unasked else 0), "\n".join(lines)


def _files_of(used: Mapping[Pin, Sequence[str]], flaw: str) -> Sequence[str]:
    name, version = flaw.split(":")[0].split(" ")
    return used[Pin(name, version)]


def used_pins() -> Mapping[Pin, Sequence[str]]:
    """Every pin, and the files that have it."""
    found: dict[Pin, list[str]] = {}
    for file in files():
        for pin in pins_of(file):
            found.setdefault(pin, []).append(file.name)
    return found


def main(binaries: Path) -> int:
    (listed,) = binaries.parent.glob("lib/python*/site-packages/safety_db/insecure_full.json")
    code, report = audit(used_pins(), asked_of(binaries), OldList.read(listed.read_text()))
    print(report)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
