"""BadAnswer, and the checks that every reader of an engine's answers shares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import Unavailable
from headrace.trajectory import LOG_PROB_SLACK, MIN_LOG_PROB

LONGEST_NAME = 200


class BadAnswer(Unavailable):
    """An engine's response is impossible. `kind` is counted; `name` are the weights that the response names."""

    def __init__(self, kind: str, message: str, name: str | None = None) -> None:
        super().__init__(f"bad answer ({kind}): {message}", reason="ENGINE_BAD_ANSWER", kind=kind)
        self.kind = kind
        self.name = name


def parse(body: bytes | str) -> Mapping[str, Any]:
    """Raises BadAnswer unless the body is a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("not_json", f"{type(error).__name__} in {body[:80]!r}") from error
    return require_object(value, "the answer")


def message_of(details: Mapping[str, Any]) -> str:
    """Returns the engine's error message, cut; empty without one."""
    message = details.get("message")
    return message[:500] if isinstance(message, str) else ""


def shown(value: Any) -> str:
    """Shows any value in a message: short, and safe for deep nesting."""
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"of type {type(value).__name__}"


def require_object(value: Any, what: str, *, kind: str = "not_an_object") -> Mapping[str, Any]:
    """Raises BadAnswer unless the value is a JSON object."""
    if not isinstance(value, dict):
        raise BadAnswer(kind, f"{what} is of type {type(value).__name__}, not an object")
    return value


def read_name(value: Any) -> str | None:
    """Returns a name of weights; None for anything else."""
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME else None


def read_pair(value: Any) -> tuple[Any, Any]:
    """Returns log-prob and token id. Raises BadAnswer."""
    if not isinstance(value, list) or len(value) < 2:
        raise BadAnswer("log_prob_shape", f"a log-prob is {shown(value)}, not [log-prob, token id, text]")
    return value[0], value[1]


def read_log_prob(value: Any) -> float:
    """Returns a finite log-prob of at most 0. Raises BadAnswer."""
    if type(value) not in (float, int) or not MIN_LOG_PROB <= value <= LOG_PROB_SLACK:  # NaN is not either
        raise BadAnswer("log_prob", f"a log-prob is {shown(value)}, must be {MIN_LOG_PROB:g} to 0")
    return min(float(value), 0.0)
