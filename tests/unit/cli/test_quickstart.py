"""`make quickstart` again goes on with what was interrupted, as the run said that the same command would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EARLIER = "quickstart-20260101-000000"
OLDER = "quickstart-20250101-000000"
STUB = """#!/bin/sh
[ "$1" = status ] && exit {status}
[ "$1" = train ] && echo "trains $4"
exit 0
"""


def quickstart(folder: Path, *, is_live: bool = False) -> str:
    script = folder / "examples" / "quickstart" / "run.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "quickstart" / "run.sh", script)
    for name in ("headrace", "python"):
        stub = folder / name
        stub.write_text(STUB.format(status=0 if is_live else 1))
        stub.chmod(0o755)
    return subprocess.check_output([script, folder, "model"], text=True, timeout=60)


def earlier(folder: Path, *parts: str, name: str = EARLIER) -> None:
    for part in parts:
        (folder / "runs" / name / part).mkdir(parents=True)


def test_an_interrupted_one_goes_on(tmp_path: Path) -> None:
    earlier(tmp_path, "checkpoints", "model", name=OLDER)
    earlier(tmp_path, "checkpoints")
    said = quickstart(tmp_path)
    assert f"runs/{EARLIER} was interrupted and goes on" in said
    assert f"trains {EARLIER}\n" in said


@pytest.mark.parametrize("parts", [(), ("logs",), ("checkpoints", "model")])
def test_another_begins_where_there_is_none_or_it_is_over_or_has_no_step(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    earlier(tmp_path, *parts)
    said = quickstart(tmp_path)
    assert "trains quickstart-20" in said
    assert f"trains {EARLIER}\n" not in said
