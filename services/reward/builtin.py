"""The table of scorers that come with headrace. Their modules are imported in workers only, when they are asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.judgement import ScoreItem
from headrace.wire.limits import MAX_REGEX_SECONDS, MAX_SCORER_SECONDS


@dataclass(frozen=True, slots=True)
class Builtin:
    """A file in scorers/. `package` judges in its stead: its version is the scorer's. `max_seconds` of one item."""

    name: str
    description: str
    package: str | None = None
    version: str = "1"
    max_seconds: float = MAX_SCORER_SECONDS


BUILTINS: Sequence[Builtin] = (
    Builtin("deepscaler", "math, but only a boxed answer after </think> counts.", "math-verify"),
    Builtin("exact_match", "1 when the response without surrounding blanks is the label."),
    Builtin("math", "1 when the boxed or last answer equals the label, by math-verify.", "math-verify"),
    Builtin("reasoning_gym", "A reasoning_gym task's own score of the answer.", "reasoning-gym"),
    Builtin("regex", "1 when metadata.pattern, or the label, is found in the response.", max_seconds=MAX_REGEX_SECONDS),
)


def installed() -> dict[str, str]:
    """Name → version of the scorers whose packages are there."""
    versions = {}
    for builtin in BUILTINS:
        if builtin.package is None:
            versions[builtin.name] = f"headrace {builtin.version}"
        elif importlib.util.find_spec(builtin.package.replace("-", "_")):
            versions[builtin.name] = f"{builtin.package} {importlib.metadata.version(builtin.package)}"
    return versions


def run_builtin(name: str, item: ScoreItem) -> float:
    """The scorer's judgement. Runs in a worker; `name` is one of `BUILTINS`."""
    value: float = importlib.import_module(f"services.reward.scorers.{name}").score(item)
    return value


def prepare_builtin(default: str | None) -> None:
    """Imports what the default scorer needs. math-verify warns that nobody watches the clock; the pool does."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if default is not None:
        importlib.import_module(f"services.reward.scorers.{default}")
