"""`python -m tests.mutants.run [AREA …] [--jobs N] [--only TEXT]`: which mutants the tests kill, and which survive.

Each is applied to a copy of the tree; its tests run there with -x and a time limit (one that hangs them is killed).
Exit status 1 when a mutant survives that README.md does not explain.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutant import AREAS, ROOT, Mutant, mutants_of

_SECONDS = 300
_README = Path(__file__).parent / "README.md"


@contextmanager
def tree_copy() -> Iterator[Path]:
    """What git knows of the tree, as it lies here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
        yield folder


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether its tests pass over the changed file; the copy is as before afterwards."""
    original = (folder / mutant.file).read_text()
    (folder / mutant.file).write_text(mutant.applied(original))
    try:
        return passes(mutant.killed_by, folder)
    finally:
        (folder / mutant.file).write_text(original)


def passes(tests: Sequence[str], folder: Path) -> bool:
    """Whether these tests pass in a copy of the tree; False as well when they take too long."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run(mutants: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """The survivors. Prints one line for each mutant as it ends."""
    free: SimpleQueue[Path] = SimpleQueue()
    survivors: list[Mutant] = []

    def one(mutant: Mutant) -> None:
        folder = free.get()
        try:
            survived = survives(mutant, folder)
        finally:
            free.put(folder)
        if survived:
            survivors.append(mutant)
        print(f"{'SURVIVED' if survived else 'killed  '} {mutant}", flush=True)

    with tree_copy() as first, tree_copy() as second:
        folders = [first, second][:jobs]
        for folder in folders:
            free.put(folder)
        for tests in sorted({mutant.killed_by for mutant in mutants}):
            assert passes(tests, folders[0]), f"{tests} fail without any mutant"
        with ThreadPoolExecutor(len(folders)) as workers:
            list(workers.map(one, mutants))
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[[], *AREAS], default=[], metavar="AREA")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2)
    parser.add_argument("--only", default="", help="part of a mutant's line")
    options = parser.parse_args(arguments)
    mutants = [m for area in options.areas or AREAS for m in mutants_of(area) if options.only in str(m)]
    survivors = run(mutants, options.jobs)
    explained = _README.read_text()
    unexplained = [mutant for mutant in survivors if f"`{mutant.name}`" not in explained]
    counts = Counter(mutant.area for mutant in mutants)
    print(f"{len(mutants)} mutants ({dict(counts)}): {len(mutants) - len(survivors)} killed, {len(survivors)} survived")
    for mutant in unexplained:
        print(f"not explained in README.md: {mutant}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
