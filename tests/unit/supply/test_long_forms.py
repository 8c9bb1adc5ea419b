"""A test that has a long form is run in it by a line of the Makefile: one that nothing runs is no test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ASKED = re.compile(r'environ\.get\("(HEADRACE_\w+)"|"(HEADRACE_\w+)" (?:not )?in os\.environ')
_IS_WHOLE_RUN = re.compile(r"^from tests\.long_forms import", re.MULTILINE)


def test_a_line_of_the_makefile_runs_every_long_form() -> None:
    forms = [(path, name) for path in sorted((ROOT / "tests").rglob("test_*.py")) for name in asked(path)]
    assert forms, "the pattern finds none"
    left = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in forms
        if not any(runs(*line, path, name) for line in lines())
    ]
    assert not left, "no line of the Makefile runs these"


def asked(path: Path) -> set[str]:
    """The variables that a test asks for; a seed repeats what a failure printed, and has no long form."""
    text = path.read_text()
    found = {first or second for first, second in _ASKED.findall(text)}
    found |= {"HEADRACE_WHOLE_RUNS"} if _IS_WHOLE_RUN.search(text) else set()
    return {name for name in found if not name.endswith("_SEED")}


def lines() -> list[tuple[set[str], list[Path]]]:
    """Of each line that runs pytest: what it sets, and where the tests are; one with -k leaves some of them out."""
    said = re.sub(r"\\\n\s*", "", (ROOT / "Makefile").read_text()).splitlines()
    return [
        (set(re.findall(r"(HEADRACE_\w+)=", line)), [ROOT / word for word in line.split() if word.startswith("tests/")])
        for line in said
        if "-m pytest" in line and " -k " not in line
    ]


def runs(names: set[str], places: list[Path], path: Path, name: str) -> bool:
    """Whether a line sets the variable for the file, or for one test of it that is named."""
    return name in names and any(path.is_relative_to(str(place).split("::")[0]) for place in places)
