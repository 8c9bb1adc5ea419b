"""The lists of mutants are true of the code as it is, and a few of them are tried: `make mutants` tries all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from random import Random

import pytest

from headrace.job.option import options
from headrace.limits import syntax_tree
from tests.mutants import flags
from tests.mutants.mutant import AREAS, ROOT, Mutant, mutants_of
from tests.mutants.run import TreeUnderTest, explained, tree_under_test

MUTANTS = [mutant for area in AREAS for mutant in mutants_of(area)]
NUM_TRIED = 2
SEED = 10


@pytest.fixture(scope="module")
def tree() -> Iterator[TreeUnderTest]:
    with tree_under_test() as tests:
        yield tests


def test_there_are_as_many_mutants_as_were_promised() -> None:
    assert len(MUTANTS) >= 150
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_explained_survivor_is_one_of_them() -> None:
    assert explained() <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_mutant_has_exactly_one_place_and_is_python(file: str) -> None:
    source = (ROOT / file).read_text()
    for mutant in (m for m in MUTANTS if m.file == file):
        changed = mutant.applied(source)
        assert ast.dump(syntax_tree(changed)) != ast.dump(syntax_tree(source)), mutant
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.killed_by), mutant


def test_a_few_mutants_are_killed_and_the_tree_is_not_touched(tree: TreeUnderTest) -> None:
    quick = [
        m for m in MUTANTS if m.file == "headrace/digest.py" or m.file.startswith("services/buffer/ledger/admission")
    ]
    tried: list[Mutant] = Random(SEED).sample(quick, NUM_TRIED)
    before = {mutant.file: (ROOT / mutant.file).read_text() for mutant in tried}
    assert [mutant for mutant in tried if tree.survives(mutant)] == []
    assert {file: (tree.folder / file).read_text() for file in before} == before
    assert {file: (ROOT / file).read_text() for file in before} == before


def test_a_flag_that_is_ignored_fails_its_own_test_and_no_other(tree: TreeUnderTest) -> None:
    test = "tests/unit/job/test_run_name.py::test_a_run_name_is_letters_digits_and_three_signs"
    ignored = {name: flags.mutant(options()[name], test) for name in ("run_name", "num_rollout")}
    assert [name for name, mutant in ignored.items() if tree.survives(mutant)] == ["num_rollout"]
