"""`python -m tools.requirements [--write | --resolve]`: the pinned sets beside `requirements/cpu.txt`.

buffer.txt and reward.txt are the parts of cpu.txt that those services need, by what their packages say of themselves.
cuda-rollout.txt and cuda-trainer.txt are resolved by uv, with hashes, for Linux and Python 3.12. Without a word the
parts are compared; `--resolve` asks the registry whether the CUDA sets still resolve to what is written, and installs
nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
PROJECTS = ("pyproject.toml", "services/pyproject.toml")
"""headrace and headrace-services."""
PARTS = {"buffer": ("buffer", "postgres"), "reward": ("reward",)}
CUDA = ("rollout", "trainer")
_COMPILE = (
    *("uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"),
    *("--no-emit-package", "headrace", "--no-emit-package", "headrace-services"),
    *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34"),
)
_SECONDS = 600.0


def pins() -> dict[str, str]:
    """The lines of cpu.txt by the names of their packages."""
    lines = (line.split("#")[0].strip() for line in (FOLDER / "cpu.txt").read_text().splitlines())
    return {canonicalize_name(Requirement(line).name): line for line in lines if line}


def needed(extras: Sequence[str]) -> list[str]:
    """The packages that the project needs with some of its extras, and all that they need, sorted.

    Read from pyproject.toml and from the packages that are installed here.
    """
    todo = list(allowed(extras))
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            todo += map(Requirement, _needs(requirement))
    return sorted({name for name, _ in seen})


def allowed(extras: Sequence[str]) -> list[Requirement]:
    """The requirements that both distributions of this repository state themselves, for some extras of headrace."""
    project, services = (tomllib.loads((ROOT / file).read_text())["project"] for file in PROJECTS)
    own = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    stated = []
    for requirement in map(Requirement, own):
        if requirement.name != services["name"]:
            stated.append(requirement)
            continue
        for extra in requirement.extras:
            stated += map(Requirement, services["optional-dependencies"][extra])
    return stated


def _needs(requirement: Requirement) -> Iterable[str]:
    for line in importlib.metadata.requires(requirement.name) or []:
        marker = Requirement(line).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (requirement.extras or {""})):
            yield line


def part(name: str) -> str:
    """The text of a part's file."""
    known = pins()
    head = f"# What `services.{name}` needs, without torch: written by `python -m tools.requirements --write`.\n"
    return head + "".join(f"{known[package]}\n" for package in needed(PARTS[name]))


def resolve(name: str, output: Path) -> None:
    """Lets uv write a CUDA set; pins that `output` has already are kept where they still fit. Raises what uv raises."""
    words = (*_COMPILE, "pyproject.toml", "--extra", f"{name}-cuda", "-o", str(output))
    subprocess.run((sys.executable, "-m", *words), check=True, timeout=_SECONDS, cwd=ROOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a file is not what it should be."""
    parser = argparse.ArgumentParser("python -m tools.requirements")
    parser.add_argument("--write", action="store_true", help="write all sets")
    parser.add_argument("--resolve", action="store_true", help="compare the CUDA sets with the registry")
    args = parser.parse_args(argv)
    stale = []
    for name in PARTS:
        file = FOLDER / f"{name}.txt"
        if args.write:
            file.write_text(part(name))
        elif file.read_text() != part(name):
            stale.append(file.name)
    for name in CUDA if args.write or args.resolve else ():
        file = FOLDER / f"cuda-{name}.txt"
        with tempfile.TemporaryDirectory() as folder:
            resolved = Path(folder) / file.name
            resolved.write_text(file.read_text() if file.exists() else "")
            resolve(name, resolved)
            if args.write:
                file.write_text(resolved.read_text())
            elif resolved.read_text() != file.read_text():
                stale.append(file.name)
    if stale:
        print(f"{', '.join(stale)}: not what is needed now: run python -m tools.requirements --write")
    else:
        print("the pinned sets are what is needed")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
