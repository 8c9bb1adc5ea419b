"""`python -m tools.sbom BIN`: a bill of materials of each service's packages, CycloneDX 1.6, in `dist/sbom`.

BIN has cyclonedx-py. The same requirements give the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

from tools.pinned import FOLDER, ROOT, Pin, pins_of

OUTPUT = ROOT / "dist" / "sbom"
SETS = {
    "buffer": ("buffer.txt",),
    "reward": ("reward.txt",),
    "rollout": ("cuda-rollout.txt",),
    "trainer": ("cuda-trainer.txt",),
    "cpu": ("cpu.txt", "cpu-no-deps.txt"),
}
"""The requirements of each service, and of all of them on a CPU."""
_SECONDS = 120.0


def write(program: Path, name: str, output: Path) -> int:
    """Returns the number of packages. Raises AssertionError where the bill lacks one of them or has another."""
    texts = [(FOLDER / file).read_text() for file in SETS[name]]
    subprocess.run(
        [str(program), "requirements", "-", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible",
         "--sv", "1.6", "--of", "JSON", "-o", str(output)],
        input="\n".join(texts), text=True, check=True, timeout=_SECONDS, cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},  # that the pins name no graph
    )  # fmt: skip
    listed = {Pin(canonicalize_name(each["name"]), each["version"]) for each in _components(output)}
    pinned = {pin for file in SETS[name] for pin in pins_of(FOLDER / file)}
    assert listed == pinned, f"{output} and {SETS[name]} differ: {sorted(listed ^ pinned)}"
    return len(listed)


def _components(output: Path) -> list[dict[str, str]]:
    return list(json.loads(output.read_text())["components"])


def main(binaries: Path) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        output = OUTPUT / f"headrace-{name}.cdx.json"
        print(f"{output.relative_to(ROOT)}: {write(binaries / 'cyclonedx-py', name, output)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
