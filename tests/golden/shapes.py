"""What a finished run leaves for people: the files of its folder, and what status, samples and audit say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.jobs import headrace, played


def shapes(folder: Path) -> dict[str, Any]:
    """Of the job `grpo`. Names and numbers that differ from run to run are signs: `#` a number, `*` a drawn name."""
    played("grpo", folder)
    run = folder / "runs" / "golden"
    samples = [json.loads(line) for line in headrace("samples", str(run), "--json", "-n", "3").splitlines()]
    return {
        "files": sorted({_signed(str(path.relative_to(run)), folder) for path in run.rglob("*") if path.is_file()}),
        "job": sorted(_paths(json.loads((run / "job.json").read_text()))),
        "services": sorted({_signed(path, folder) for path in _paths(json.loads((run / "services.json").read_text()))}),
        "trained": sorted(_paths(json.loads((run / "trained.jsonl").read_text().splitlines()[0]))),
        "samples": sorted(_paths(samples)),
        "status": _signed(headrace("status", str(run)), folder).splitlines(),
        "audit": _signed(headrace("audit", str(run)), folder).splitlines(),
        "audit --deep": _signed(headrace("audit", str(run), "--deep"), folder).splitlines(),
    }


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Every key, with its place and the kind of its value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from _paths(each, f"{path}[]")
        yield f"{path} list"
    else:
        yield f"{path} {type(value).__name__}"


def _signed(text: str, folder: Path) -> str:
    text = re.sub(r"\b[0-9a-f]{12,}\b", "*", text.replace(str(folder), "{folder}"))
    return re.sub(r"\d+(\.\d+)?", "#", text)
