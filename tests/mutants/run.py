"""`python -m tests.mutants.run [AREA …] [--jobs N] [--only TEXT]`: which mutants the tests kill, and which survive.

Each is applied to a copy of the tree; its tests run there with -x and a time limit (one that hangs them is killed).
Exit status 1 when a mutant survives that README.md does not explain. One that it explains and that is killed is named.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue

from tests.mutants.mutant import AREAS, ROOT, Mutant, mutants_of

_LIBRARIES = (
    *("aiohttp.web", "grpc_reflection.v1alpha.reflection", "psycopg", "pyarrow", "sqlite3", "yaml"),
    *("safetensors.torch", "torch.distributed", "megatron.core.optimizer"),
)
_README = Path(__file__).parent / "README.md"
_SLOW = (
    "tests/contract/buffer/test_buffer_shards.py::test_a_shard_that_is_down_delays_its_groups_and_loses_none",
    "tests/contract/buffer/test_buffer_shards.py::test_failed_groups_are_tried_again_on_every_shard",
)
_ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider", "-k", "not postgres", *(f"--deselect={test}" for test in _SLOW))


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
        # By hash: of a file that is changed and changed back within a second, no stale bytecode is taken.
        compileall.compile_dir(folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        yield folder


class TreeUnderTest:
    """pytest over a copy of the tree."""

    def __init__(self, folder: Path, libraries: Sequence[str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_pytest.py")), str(folder), *libraries],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def pass_(self, tests: Sequence[str]) -> bool:
        """Whether they do; False as well when they take too long."""
        assert self._process.stdin
        print(json.dumps([*_ARGUMENTS, *tests]), file=self._process.stdin, flush=True)
        return self._answer() == "0"

    def survives(self, mutant: Mutant) -> bool:
        """Whether its tests pass over the changed file; the copy is as before afterwards."""
        file = self.folder / mutant.file
        original = file.read_text()
        file.write_text(mutant.applied(original))
        try:
            return all(self.pass_([test]) for test in mutant.killed_by)
        finally:
            file.write_text(original)

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@contextmanager
def tree_under_test(*libraries: str) -> Iterator[TreeUnderTest]:
    """A copy of its own; the libraries are imported once for all tests."""
    with tree_copy() as folder:
        tests = TreeUnderTest(folder, libraries)
        try:
            yield tests
        finally:
            tests.close()


def run(mutants: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """The survivors. Prints a line for each file of tests that passes without a mutant, then one for each mutant."""
    free: SimpleQueue[TreeUnderTest] = SimpleQueue()
    files = sorted({file for mutant in mutants for file in mutant.killed_by})

    def passes(file: str) -> bool:
        with _lent(free) as tests:
            passed = tests.pass_([file])
        print(f"{'passes  ' if passed else 'FAILS   '} {file}", flush=True)
        return passed

    def survives(mutant: Mutant) -> bool:
        with _lent(free) as tests:
            survived = tests.survives(mutant)
        print(f"{'SURVIVED' if survived else 'killed  '} {mutant}", flush=True)
        return survived

    with ExitStack() as stack:
        for _ in range(jobs):
            free.put(stack.enter_context(tree_under_test(*_LIBRARIES)))
        workers = stack.enter_context(ThreadPoolExecutor(jobs))
        failing = [file for file, passed in zip(files, workers.map(passes, files), strict=True) if not passed]
        assert not failing, f"{failing} fail without any mutant"
        return [mutant for mutant, survived in zip(mutants, workers.map(survives, mutants), strict=True) if survived]


@contextmanager
def _lent(free: SimpleQueue[TreeUnderTest]) -> Iterator[TreeUnderTest]:
    tests = free.get()
    try:
        yield tests
    finally:
        free.put(tests)


def explained() -> set[str]:
    """The names of the survivors that README.md gives a reason for."""
    return set(re.findall(r"^- `([\w-]+)`:", _README.read_text(), re.MULTILINE))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[[], *AREAS], default=[], metavar="AREA")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", default="", help="part of a mutant's line")
    options = parser.parse_args(arguments)
    mutants = [m for area in options.areas or AREAS for m in mutants_of(area) if options.only in str(m)]
    survivors = run(mutants, options.jobs)
    unexplained = [mutant for mutant in survivors if mutant.name not in explained()]
    counts = Counter(mutant.area for mutant in mutants)
    print(f"{len(mutants)} mutants ({dict(counts)}): {len(mutants) - len(survivors)} killed, {len(survivors)} survived")
    for mutant in unexplained:
        print(f"not explained in README.md: {mutant}")
    for mutant in mutants:
        if mutant.name in explained() and mutant not in survivors:
            print(f"explained in README.md, and killed: take it out there: {mutant}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
