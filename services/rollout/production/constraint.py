"""A JSON schema or a regular expression of a caller's that responses must fit, checked before an engine sees it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.limits import MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, read_json, require_bytes, shown
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.replies import BadAnswer

_NUL = "\0"


def require_schema(text: str, field: str) -> None:
    """Raises InvalidArgument for one that is no object, too large, or refers to elsewhere."""
    require_bytes(len(text.encode("utf-8", "surrogatepass")), MAX_SCHEMA_BYTES, field)
    try:
        schema = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is not JSON: {shown(text)}: {error}", field=field) from error
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{field} must be a JSON object, is {shown(text)}", field=field)
    for depth, key, value in _parts(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidArgument(f"{field} is nested deeper than {MAX_SCHEMA_DEPTH} levels", field=field)
        if _NUL in key or (isinstance(value, str) and _NUL in value):
            raise InvalidArgument(f"{field} holds a NUL character, which no grammar can", field=field)
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise InvalidArgument(
                f"{field} refers to {shown(value)}: only references into the schema itself (#/$defs/…) are followed",
                field=field,
            )


def require_regex(text: str, field: str) -> None:
    """Raises InvalidArgument for an empty one, or one that is too large."""
    require_bytes(len(text.encode("utf-8", "surrogatepass")), MAX_REGEX_BYTES, field)
    if not text or _NUL in text:
        raise InvalidArgument(f"{field} is empty, or holds a NUL character", field=field)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yields depth, key and value of everything in the schema, without recursion; items of arrays have no key."""
    left: list[tuple[int, str, Any]] = [(1, "", schema)]
    while left:
        depth, key, value = left.pop()
        yield depth, key, value
        if depth > MAX_SCHEMA_DEPTH:
            return
        if isinstance(value, dict):
            left += [(depth + 1, inner, each) for inner, each in value.items()]
        elif isinstance(value, list):
            left += [(depth + 1, "", each) for each in value]


@contextlib.asynccontextmanager
async def of_grammar(params: SamplingParams) -> AsyncGenerator[None, None]:
    """Makes an engine's failure over a caller's grammar the caller's error: another engine would fail, too.

    A grammar that allows no token at all, as `{"$ref": "#"}`, has log-probs that are no numbers in a stream.
    """
    try:
        yield
    except Unavailable as error:
        allows_no_token = isinstance(error, BadAnswer) and error.kind == "log_prob"
        if params.is_constrained and (allows_no_token or "grammar" in error.message.lower()):
            raise InvalidArgument(
                f"the engine cannot follow this json_schema or regex: {error.message}",
                reason="GRAMMAR_FAILED",
                field="sampling",
            ) from error
        raise
