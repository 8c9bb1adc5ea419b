"""The scorers of a service, and which of them scores an item.

A function that an item names itself (a data source's `custom_rm_path`) scores it. A function that the job's eval_config
names scores the items whose `metadata.rm_type` is its path. A custom function,
where one is configured, scores every other item unless the request names another scorer: such functions tell rm_types
apart themselves. Otherwise the item's `metadata.rm_type` decides, then the request's scorer, then the default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.errors import ConfigError, NotFound
from headrace.hooks import RewardHook
from headrace.score import CUSTOM_RM_PATH, ScoreError, ScoreItem
from headrace.suggest import nearest
from headrace.wire.checks import shown
from services.reward.builtin import BOXED, BUILTINS, Builtin, installed

CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to score: a user's function, or one of headrace's own. A `boxed` one sees what a response has boxed."""

    name: str
    version: str
    description: str
    hook: RewardHook | None = None
    builtin: Builtin | None = None
    boxed: bool = False


class Registry:
    """The scorers by name. Raises ConfigError when the default is none of them."""

    def __init__(self, scorers: Iterable[Scorer], default: str | None, of_evaluations: Iterable[Scorer] = ()) -> None:
        self._scorers = {scorer.name: scorer for scorer in scorers}
        self._of_evaluations = {scorer.name: scorer for scorer in of_evaluations}
        if default is not None and self._find(default) is None:
            raise ConfigError(f"rm_type is {self._unknown(default)}")
        self.default = default

    @classmethod
    def of(cls, rm_type: str | None, custom: RewardHook | None, of_evaluations: Iterable[RewardHook] = ()) -> Registry:
        """Takes the installed scorers, as the default the user's function, and those of single evaluations by path."""
        versions = installed()
        scorers = [
            Scorer(each.name, versions[each.name], each.description, builtin=each)
            for each in BUILTINS
            if each.name in versions
        ]
        if custom:
            scorers.append(_users(CUSTOM, custom))
        return cls(scorers, CUSTOM if custom else rm_type, [_users(hook.path, hook) for hook in of_evaluations])

    def knows(self, path: str) -> bool:
        """True for a function of a data source or an evaluation that can be asked for by its path."""
        return path in self._of_evaluations

    def add(self, hook: RewardHook) -> None:
        """Adds a function that a sample names itself."""
        self._of_evaluations[hook.path] = _users(hook.path, hook)

    def all(self) -> list[Scorer]:
        return [self._scorers[name] for name in sorted(self._scorers)]

    def require(self, name: str) -> Scorer:
        """Raises NotFound, listing the scorers that exist."""
        found = self._find(name)
        if found is None:
            raise NotFound(f"there is no scorer {self._unknown(name)}", reason="SCORER_UNKNOWN")
        return found

    def choose(self, item: ScoreItem, requested: Scorer | None) -> Scorer | ScoreError:
        """Returns the item's scorer, or the error SCORER_UNKNOWN."""
        if path := own_function(item):
            return self._of_evaluations[path]
        named = item.metadata.get("rm_type")
        if isinstance(named, str) and named in self._of_evaluations:
            return self._of_evaluations[named]
        if self.default == CUSTOM:
            return requested or self._scorers[CUSTOM]
        if named is None and requested:
            return requested
        name = self.default if named is None else named
        if name is None:
            return ScoreError(
                "SCORER_UNKNOWN", "no scorer is named: set metadata.rm_type, the request's scorer or --rm-type"
            )
        found = self._find(name) if isinstance(name, str) else None
        return found or ScoreError("SCORER_UNKNOWN", f"metadata.rm_type is {self._unknown(name)}")

    def _find(self, name: str) -> Scorer | None:
        if name in self._scorers:
            return self._scorers[name]
        inner = self._scorers.get(name.removeprefix(BOXED))
        return replace(inner, name=name, boxed=True) if inner and inner.builtin else None

    def _unknown(self, name: object) -> str:
        if not isinstance(name, str):
            return f"a {type(name).__name__}, not a name: there are {', '.join(sorted(self._scorers))}"
        if missing := next((each for each in BUILTINS if each.name == name.removeprefix(BOXED)), None):
            return f"{name}, which needs the package {missing.package}: pip install 'headrace[{missing.extra}]'"
        near = nearest(name, self._scorers)
        hint = f"did you mean {near!r}? " if near else ""
        return f"{shown(name)}: {hint}There are {', '.join(sorted(self._scorers))}"


def own_function(item: ScoreItem) -> str | None:
    """The path of the function that the item names itself."""
    path = item.hook_fields.get(CUSTOM_RM_PATH)
    return path if isinstance(path, str) and path else None


def _users(name: str, hook: RewardHook) -> Scorer:
    return Scorer(name, f"{hook.path} {hook.version}", hook.description, hook)
