"""The audit of what is pinned: silence is never taken for innocence. The bills of materials cover each service."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import sbom
from tools.audit import Ask, Flaws, OldList, Silent, asked_of, audit, used_pins
from tools.pinned import FOLDER, Pin, files, pins_of

ONE, TWO = Pin("one", "1.0"), Pin("two", "2.0")
USED = {ONE: ["a.txt"], TWO: ["a.txt", "b.txt"]}
OLD = OldList("2021-07-01", {"two": [("CVE-2", "<1.0")]})


def answering(**services: Flaws | None) -> Ask:
    """None is a service that cannot be reached."""

    def ask(service: str, pins: Sequence[Pin]) -> Flaws:
        found = services.get(service)
        if found is None:
            raise Silent("no route to host")
        return {pin: flaws for pin, flaws in found.items() if pin in pins}

    return ask


@pytest.mark.parametrize(
    ("ask", "old", "code", "said"),
    [
        (answering(osv={ONE: [], TWO: []}), OLD, 0, "0 flaws are known of 2 of 2 pins"),
        (answering(osv={ONE: []}, pypi={TWO: []}), OLD, 0, "pypi answered for 1 of 1 pins"),
        (answering(), OLD, 2, "osv did not answer: no route to host\npypi did not answer"),
        (answering(osv={}, pypi={}), OLD, 2, "NOT AUDITED: 2 pins"),
        (answering(osv={ONE: []}, pypi={}), OLD, 2, "NOT AUDITED: 1 pins"),
        (
            answering(osv={ONE: [], TWO: ["CVE-9 (mended in 2.1)"]}),
            OLD,
            1,
            "FLAW two 2.0: CVE-9 (mended in 2.1), in a.txt, b",
        ),
        (answering(), OldList("2021-07-01", {"two": [("CVE-2", "<3")]}), 1, "FLAW two 2.0: CVE-2 (list of 2021-07-01)"),
        (answering(), OldList("2021-07-01", {"two": [("CVE-2", "<r5238")]}), 1, "FLAW two 2.0: CVE-2"),
        (answering(osv={ONE: [], TWO: []}), OldList("2021-07-01", {"two": [("CVE-2", "<3")]}), 0, "0 flaws"),
    ],
)
def test_the_audit_ends_well_only_where_a_service_answered_for_every_pin(
    ask: Ask, old: OldList, code: int, said: str
) -> None:
    found, report = audit(USED, ask, old)
    assert found == code
    assert said in report
    assert ("which knows no later flaw" in report) == ("NOT AUDITED" in report)


def program(folder: Path, text: str) -> Path:
    """A folder with a pip-audit that does this."""
    file = folder / "pip-audit"
    file.write_text(f"#!{sys.executable}\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return folder


def test_a_package_that_pip_audit_skips_is_not_answered_for(tmp_path: Path) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}
    found = [{"name": "One", "version": "1.0", "vulns": [flaw]}, {"name": "two", "skip_reason": "not found on PyPI"}]
    ask = asked_of(program(tmp_path, f"print({json.dumps(json.dumps({'dependencies': found}))})"))
    assert ask("pypi", [ONE, TWO]) == {ONE: ["PYSEC-1 (mended in 1.1)"]}


def test_every_pin_of_every_file_is_audited_and_each_service_has_a_bill() -> None:
    used = used_pins()
    assert {name for names in used.values() for name in names} == {file.name for file in files()}
    assert set(sbom.SETS) == {"buffer", "reward", "rollout", "trainer", "cpu"}
    for names in sbom.SETS.values():
        for name in names:
            assert set(pins_of(FOLDER / name)) <= used.keys()
