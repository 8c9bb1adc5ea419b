"""`python -m tools.examples [--steps N] [NAME …]`: runs the examples as their READMEs say, a few steps of each.

What runs is the first block of commands of examples/NAME/README.md, in a copy of the folder. Then each run that it has
left is audited. All examples are tried; the exit code is 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
_SECONDS = 3600.0
_NEEDED = ("protos", ".venv-protos", ".venv-verifiers")
"""What commands of an example name beside examples/."""


def names() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def commands(name: str) -> str:
    """The first block of a README."""
    text = (EXAMPLES / name / "README.md").read_text()
    block = re.search(r"^```bash\n(.*?)^```", text, re.S | re.M)
    assert block, f"examples/{name}/README.md has no block of commands"
    return block[1]


def copy_examples(place: Path) -> Path:
    """Returns the copy of examples/, without what runs have left there."""
    shutil.copytree(EXAMPLES, place / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__", "*.jsonl"))
    for needed in _NEEDED:
        (place / needed).symlink_to(ROOT / needed)
    return place / "examples"


def run(folder: Path, steps: int) -> int:
    """Returns the exit code of an example's commands, or of the first audit that found something."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HEADRACE_NUM_ROLLOUT": str(steps)}
    script = ["bash", "-euo", "pipefail", "-c", commands(folder.name)]
    try:
        code = subprocess.run(script, cwd=folder, env=environment, timeout=_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 124
    for ledger in () if code else sorted(folder.rglob("runs/*/ledger")):
        audit = ["headrace", "audit", str(ledger.parent)]
        code = code or subprocess.run(audit, env=environment, timeout=_SECONDS).returncode
    return code


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.examples", description="Runs examples, a few steps of each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args(words)
    if unknown := sorted(set(chosen.names) - set(names())):
        parser.error(f"no example is named {', '.join(unknown)}: there are {', '.join(names())}")
    ended = []
    with tempfile.TemporaryDirectory(prefix="headrace-examples-") as place:
        examples = copy_examples(Path(place))
        for number, name in enumerate(every := chosen.names or names(), start=1):
            print(f"── {name} ({number} of {len(every)})", flush=True)
            start = time.monotonic()
            code = run(examples / name, chosen.steps)
            ended.append((name, code, time.monotonic() - start))
    for name, code, seconds in ended:
        print(f"{name:16}  {'ok' if not code else f'failed with exit code {code}':28}  {seconds:5.0f} s")
    return int(any(code for _, code, _ in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
