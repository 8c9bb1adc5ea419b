"""`python -m tests.golden record|compare [PART …]`: what the product does, and whether it is still what was recorded.

The parts are the names of jobs (tests/golden/jobs.py), `lines`, `shapes` and `protos`; without any all of
them. Each is one file in `recorded/`. `record` refuses to replace one. Exit status 1 where something differs.
Jobs are compared to the last bit: on another processor, figures and weights may differ where the product does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.job.schema.job import CONSTANTS, MERGED
from tests.golden.jobs import JOBS, ROOT, played
from tests.golden.lines import resolved_lines
from tests.golden.shapes import shapes

RECORDED = Path(__file__).parent / "recorded"
PROTOS = RECORDED / "protos.binpb"
_BUF = ROOT / ".venv-protos" / "bin" / "buf"
_SHOWN = 20


def main(order: str, *parts: str) -> int:
    """Returns the exit status."""
    chosen = parts or ("protos", *PARTS)
    if order == "record":
        for part in chosen:
            _record(part)
        return 0
    return max(_compare(part) for part in chosen)


def _record(part: str) -> None:
    target = PROTOS if part == "protos" else RECORDED / f"{part}.json"
    if target.exists():
        raise SystemExit(f"{target} is recorded, once for all: compare with it, or say in its commit why it goes")
    RECORDED.mkdir(exist_ok=True)
    print(f"── {part}", flush=True)
    if part == "protos":
        subprocess.run([_BUF, "build", "protos", "--exclude-source-info", "-o", PROTOS], cwd=ROOT, check=True)
    else:
        target.write_text(json.dumps(_made(part), indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _compare(part: str) -> int:
    found = list(_differences_of(part))
    print(f"── {part}: {len(found) or 'no'} differences", *found[:_SHOWN], sep="\n", flush=True)
    return 1 if found else 0


def _differences_of(part: str) -> Iterator[str]:
    if part == "protos":
        command = [str(_BUF), "breaking", "protos", "--against", str(PROTOS)]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
        yield from (done.stdout + done.stderr).splitlines()
        return
    recorded, made = json.loads((RECORDED / f"{part}.json").read_text()), json.loads(json.dumps(_made(part)))
    yield from _differences(recorded, made)


def _differences(recorded: Any, made: Any, path: str = "") -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(made, dict):
        for key in sorted(recorded.keys() | made.keys()):
            if key not in made and key in (*CONSTANTS, *MERGED):  # an option that is gone
                continue
            if key not in made:
                yield f"{path}.{key}: was {_short(recorded[key])}, is gone"
            elif key not in recorded:
                yield f"{path}.{key}: is new: {_short(made[key])}"
            else:
                yield from _differences(recorded[key], made[key], f"{path}.{key}")
    elif isinstance(recorded, list) and isinstance(made, list) and len(recorded) == len(made):
        for index, (old, new) in enumerate(zip(recorded, made, strict=True)):
            yield from _differences(old, new, f"{path}[{index}]")
    elif recorded != made:
        yield f"{path}: was {_short(recorded)}, is {_short(made)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 160 else f"{text[:160]}…"


def _made(part: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        return PARTS[part](Path(folder))


PARTS: Mapping[str, Callable[[Path], Any]] = {
    "lines": resolved_lines,
    **{name: partial(played, name) for name in JOBS},
    "shapes": shapes,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
