"""The whole job is read where a process starts and where its parts are put together; parts take what they need."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.sizes import ROOT

READERS = {
    "__main__.py",
    "export_checkpoint.py",
    "control/build.py",
    "model/build.py",
    "rl/build.py",
}


def test_only_starts_and_builds_of_the_trainer_read_the_whole_job() -> None:
    trainer = ROOT / "services" / "trainer"
    assert {str(file.relative_to(trainer)) for file in trainer.rglob("*.py") if imports_job(file)} == READERS


def imports_job(file: Path) -> bool:
    """Not one of its sections."""
    return any(
        isinstance(node, ast.ImportFrom) and "Job" in [name.name for name in node.names]
        for node in ast.walk(ast.parse(file.read_text()))
    )
