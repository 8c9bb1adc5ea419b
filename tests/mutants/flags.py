"""`python -m tests.mutants.flags [OPTION …]`: does the test that tests/flags.toml names fail when its flag is ignored?

For each option the base class of a job's sections is changed in a copy of the tree: what is given for the option is
dropped, and it reads as its default, in the test's process and in all that it starts. Prints a line for each; exit
status 1 when a test passes all the same. A test that fails without any change (it may need what this machine has not,
or more time) tells nothing, and is named.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence

from headrace.job.option import Option
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.run import TreeUnderTest, tree_under_test
from tools.flags import described

_FILE = "headrace/job/schema/section.py"
_CLASS = "class Section(BaseModel):"
_DERIVED = frozenset({"rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"})
"""Filled in from other options, so what is read is not what was given."""
_LIBRARIES = ("aiohttp.web", "megatron.core.optimizer", "safetensors.torch", "torch.distributed", "transformers")
_IGNORING = """from pydantic import model_validator


class _Ignoring(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _drop(cls, data):
        given = isinstance(data, dict) and {option!r} in cls.model_fields
        return {{name: value for name, value in data.items() if name != {option!r}}} if given else data

    def __getattribute__(self, name):
        if name == {read!r} and name in type(self).model_fields:
            return type(self).model_fields[name].get_default(call_default_factory=True)
        value = super().__getattribute__(name)
        return value - {{{option!r}}} if name == "model_fields_set" else value


class Section(_Ignoring):"""


def mutant(option: Option, test: str) -> Mutant:
    """The tree in which `option` has no effect."""
    read = "" if option.name in _DERIVED else option.name
    return Mutant("flags", _FILE, _CLASS, _IGNORING.format(option=option.name, read=read), (test,))


def survivors(flags: Sequence[Option], shown_by: Mapping[str, str], tests: TreeUnderTest) -> list[Option]:
    """Those whose test passes although they are ignored. Prints one line for each as it is known."""
    green: dict[str, bool] = {}
    found: list[Option] = []
    for option in sorted(flags, key=lambda option: shown_by[option.name]):
        test = shown_by[option.name]
        if test not in green:
            green[test] = tests.pass_([test])
        survived = green[test] and tests.survives(mutant(option, test))
        if survived:
            found.append(option)
        outcome = "SURVIVED" if survived else "killed  " if green[test] else "not run "
        print(f"{outcome} {option.flag} {test}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    shown_by: dict[str, str] = tomllib.loads((ROOT / "tests" / "flags.toml").read_text())["shown_by"]
    flags = {option.name: option for option in described() if option.name in shown_by and not option.required}
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.flags", description=__doc__)
    parser.add_argument("options", nargs="*", choices=[[], *flags], default=[], metavar="OPTION")
    chosen = parser.parse_args(arguments).options or flags
    with tree_under_test(*_LIBRARIES) as tests:
        found = survivors([flags[name] for name in chosen], shown_by, tests)
    print(f"{len(chosen)} flags tried, {len(found)} whose test passes without them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
