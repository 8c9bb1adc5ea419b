"""Scores 1 when the response is JSON that `metadata.schema` accepts, else 0. A block of a code fence counts alone.

Without a schema any JSON scores 1.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from headrace.errors import InvalidArgument
from headrace.limits import canonical, read_json, shown
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument for a schema that is none."""
    schema = item.metadata.get("schema", True)
    if not isinstance(schema, dict | bool):
        raise InvalidArgument(f"metadata.schema is {shown(schema)}, must be a JSON schema")
    validator = _validator(canonical(schema))
    text = after_thinking(item.response)
    blocks = _FENCE.findall(text)
    try:
        value = read_json(blocks[-1] if blocks else text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


@lru_cache(256)
def _validator(schema_json: str) -> Validator:
    schema: Any = json.loads(schema_json)
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise InvalidArgument(f"metadata.schema is no JSON schema: {error.message}") from error
    return kind(schema)
