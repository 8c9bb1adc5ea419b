"""Parses flags into settings: `--flag value`, `--flag=value`, `--switch`, `--no-switch`, `--many a b --many c`."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.job.names import SLIME, reason_of_each
from headrace.job.option import ALIASES, OPPOSITES, Arity, Option, Setting
from headrace.job.schema.job import CONSTANTS, MERGED
from headrace.job.schema.section import literal
from headrace.limits import did_you_mean, shown, syntax_tree


@cache
def server_args() -> frozenset[str]:
    """Fields of ServerArgs; empty where SGLang is not installed (the engines may be on another machine)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "srt"
    files = [source / "server_args.py", *sorted((source / "arg_groups" / "fields").glob("*.py"))]
    return frozenset(name for file in files if file.is_file() for name in _fields(file))


def require_known(name: str, origin: str) -> None:
    """Raises ConfigError when SGLang is installed and has no such argument."""
    known = server_args()
    if known and name not in known:
        parts = sorted(each for each in known if each.startswith(f"{name}_"))
        near = f": it has {', '.join(parts)}" if parts else did_you_mean(name, known)
        raise ConfigError(f"{origin}: SGLang has no argument {name}{near}")


def _fields(file: Path) -> list[str]:
    return [
        statement.target.id
        for node in syntax_tree(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    ]


UNSUPPORTED: Mapping[str, str] = {
    **reason_of_each(SLIME["refused"]),
    **dict.fromkeys(CONSTANTS, "it is a constant, which fits every job: leave it out"),
    **MERGED,
}
"""Why a name is refused, and what to do instead."""

SGLANG_PREFIX = "--sglang-"
_SHOWN = 80


def parse_flags(
    argv: Sequence[str], known: Mapping[str, Option], note: Callable[[str], None] = lambda _: None
) -> list[Setting]:
    """One setting for each option.

    `note` is called for an option that is given twice: its last value counts, as in argparse. Raises ConfigError that
    names every flag that is unknown or has the wrong number of values.
    """
    settings: dict[tuple[str, str], Setting] = {}
    mistakes: list[ConfigError] = []
    for flag, words in _split(argv):
        try:
            setting = _setting(flag, words, known)
        except ConfigError as mistake:
            mistakes.append(mistake)
            continue
        key = (setting.section, setting.name)
        settings[key] = _joined(settings[key], setting, known, note) if key in settings else setting
    if mistakes:
        raise _all_of(mistakes)
    return list(settings.values())


def option_value(option: Option, words: Sequence[str], origin: str) -> Any:
    """Converts `words` to the value of `option`. It checks only their number; the job's types check the rest."""
    if option.arity is Arity.PAIRS:
        if not words or len(words) % 2:
            raise ConfigError(f"{origin} takes NAME PATH pairs, got {_shown(words)}")
        return list(zip(words[::2], words[1::2], strict=True))
    if option.arity is Arity.MANY:
        if not words:
            raise ConfigError(f"{origin} takes one or more values, got none")
        return list(words)
    if option.arity is Arity.SWITCH and not words:
        return True
    if len(words) != 1:
        raise ConfigError(f"{origin} takes one value, got {_shown(words)}")
    return words[0]


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"unexpected argument {shown(word)}: flags begin with --")
    return found


def _setting(flag: str, words: list[str], known: Mapping[str, Option]) -> Setting:
    unsupported = UNSUPPORTED.get(flag.removeprefix("--").replace("-", "_"))
    if unsupported is not None:
        raise ConfigError(f"{flag} is not a flag of headrace: {unsupported}")
    name = _name(flag.removeprefix("--"))
    if flag.startswith(SGLANG_PREFIX) and name not in known:
        return _sglang(flag, words)
    if name in known:
        option = known[name]
        return Setting(option.section, option.name, option_value(option, words, flag), flag)
    negated = OPPOSITES.get(name) or _name(flag.removeprefix("--no-"))
    if negated in known and known[negated].arity is Arity.SWITCH:
        if words:
            raise ConfigError(f"{flag} takes no value, got {_shown(words)}")
        return Setting(known[negated].section, negated, False, flag)
    names = [option.flag for option in known.values()] + [f"--{alias.replace('_', '-')}" for alias in ALIASES]
    raise ConfigError(f"unknown flag {flag[:_SHOWN]}{did_you_mean(flag, names)}")


def _sglang(flag: str, words: list[str]) -> Setting:
    name = flag.removeprefix(SGLANG_PREFIX).replace("-", "_")
    require_known(name, flag)
    values = [literal(word) for word in words]
    return Setting("sglang", name, True if not values else values[0] if len(values) == 1 else values, flag)


def _joined(first: Setting, second: Setting, known: Mapping[str, Option], note: Callable[[str], None]) -> Setting:
    if first.section != "sglang" and known[first.name].arity in (Arity.MANY, Arity.PAIRS):
        return Setting(first.section, first.name, [*first.value, *second.value], first.origin)
    if first.value != second.value:
        note(
            f"{first.name} is given twice, {first.origin} {str(first.value)[:_SHOWN]} and {second.origin} "
            f"{str(second.value)[:_SHOWN]}: the last one counts"
        )
    return second


def _all_of(mistakes: Sequence[ConfigError]) -> ConfigError:
    if len(mistakes) == 1:
        return mistakes[0]
    lines = "".join(f"\n  {mistake.message}" for mistake in mistakes)
    return ConfigError(f"{len(mistakes)} flags are wrong:{lines}")


def _name(flag: str) -> str:
    name = flag.replace("-", "_")
    return ALIASES.get(name, name)


def _shown(words: Sequence[str]) -> str:
    return f"{len(words)}: {' '.join(words)[:_SHOWN]}" if words else "none"
