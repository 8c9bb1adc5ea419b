"""The frozen base class of a job's sections, and the types and checks of single values."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from headrace.errors import ConfigError
from headrace.limits import LAST_PORT, MAX_COUNTER, MAX_JSON_DEPTH, MAX_LEASE_SECONDS, MAX_PATH_CHARACTERS

_LARGEST = 1e30
_SMALLEST = 1e-30
_MAX_ENTRIES = 4096
_MAX_FOLDER_NAME_BYTES = 255
_BREAKS = "\n\t\r"


def serializable(value: Any, depth: int = 0) -> Any:
    """Returns the value. Raises ValueError for one that would not reach the run unchanged.

    Numbers are finite, and float32 and JSON can hold them; text has no control characters but line breaks and tabs.
    """
    match value:
        case float():
            _number(value)
        case int():
            if abs(value) > MAX_COUNTER:
                raise ValueError(f"should be at most {MAX_COUNTER} in size")
        case str():
            _text(value)
        case Path():
            _path(value)
        case dict() | list() | tuple():
            if depth > MAX_JSON_DEPTH or len(value) > _MAX_ENTRIES:
                raise ValueError(f"should have at most {_MAX_ENTRIES} entries, and {MAX_JSON_DEPTH} levels")
            for inner in (*value, *value.values()) if isinstance(value, dict) else value:
                serializable(inner, depth + 1)
    return value


def normalize(value: Any) -> Any:
    """Returns the value of an untyped argument. Raises ValueError for one that JSON cannot hold."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            if inner is None:
                raise ValueError("should have no null values")
            normalize(inner)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"should be text, a number, true, false or a list, not {type(value).__name__}")
    return serializable(value)


def _number(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError("should be a finite number")
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise ValueError(f"should be 0, or between {_SMALLEST:g} and {_LARGEST:g} in size: float32 holds no other")


def _text(value: str) -> None:
    if len(value) > MAX_PATH_CHARACTERS:
        raise ValueError(f"should have at most {MAX_PATH_CHARACTERS} characters, not {len(value)}")
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in value if each not in _BREAKS):
        raise ValueError("should have no control characters and be valid UTF-8")


def _path(value: Path) -> None:
    _text(str(value))
    if any(each in str(value) for each in _BREAKS):
        raise ValueError("should be a path without line breaks")
    if any(len(part.encode()) > _MAX_FOLDER_NAME_BYTES for part in value.parts):
        raise ValueError(f"should be a path whose names have at most {_MAX_FOLDER_NAME_BYTES} bytes")


_LEAST_TEMPERATURE = 1e-3


def _not_nearly_zero(value: float) -> float:
    """Refuses tiny temperatures, because logits are divided by them in float32."""
    if 0 < value < _LEAST_TEMPERATURE:
        raise ValueError(f"should be 0, which is greedy, or at least {_LEAST_TEMPERATURE:g}")
    return value


_MAX_INT32 = (1 << 31) - 1

Positive = Annotated[int, Field(gt=0, le=_MAX_INT32)]
NonNegative = Annotated[int, Field(ge=0, le=_MAX_INT32)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Port = Annotated[int, Field(gt=0, le=LAST_PORT)]
Bytes = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
Seconds = Annotated[float, Field(ge=1e-3, le=MAX_LEASE_SECONDS)]
Share = Annotated[float, Field(gt=0, le=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Coefficient = Annotated[float, Field(ge=0, le=1e4)]
"""The weight of a term in a loss or a reward."""
Score = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A reward."""
Rate = Annotated[float, Field(ge=0, le=100)]
"""A learning rate, a weight decay."""
Temperature = Annotated[float, Field(ge=0, le=1e3), AfterValidator(_not_nearly_zero)]


class Section(BaseModel):
    """Frozen. Refuses unknown keys, and values that could not be written to a file or computed with.

    The text below a field is its help, which `headrace.job.option` reads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _serializable(cls, value: Any) -> Any:
        return serializable(value)


def url(text: str) -> str:
    """Returns the URL. Raises ValueError for another text."""
    if not text.startswith(("http://", "https://")):
        raise ValueError("is not a URL: write http://host:port/path")
    return text


Url = Annotated[str, AfterValidator(url)]


def literal(word: str) -> Any:
    """A number, true, false, null or other JSON if the word is one; else the word itself."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):  # no JSON, or a number or nesting beyond what Python reads
        return {"True": True, "False": False, "None": None}.get(word, word)


def _from_json(value: Any) -> Any:
    return literal(value) if isinstance(value, str) else value


FromJson = BeforeValidator(_from_json)
"""Reads a union's value: `--moe-layer-freq 1` is a number, `--moe-layer-freq "[0, 1]"` is a list."""


_SLICE = re.compile(r"(?P<path>.+)@\[(?P<first>[0-9]{0,18}):(?P<end>[0-9]{0,18})\]")


@dataclass(frozen=True, slots=True)
class PromptPath:
    """A file and the range of its rows; an `end_row` of None means the last."""

    path: Path
    first_row: int = 0
    end_row: int | None = None

    @classmethod
    def parse(cls, text: str, option: str = "prompt_data") -> PromptPath:
        """Raises ConfigError, which names the option, for a slice that does not parse, or that is empty."""
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ConfigError(
                    f"{option} {text}: write a slice as path@[a:b], with lines a to b counted from 0; "
                    "both are optional, and neither may be negative",
                    field=option,
                )
            return cls(Path(text))
        first, end = int(match["first"] or 0), int(match["end"]) if match["end"] else None
        if end is not None and end <= first:
            raise ConfigError(f"{option} {text}: the slice holds no lines", field=option)
        return cls(Path(match["path"]), first, end)

    def absolute(self) -> str:
        """The same slice with an absolute path."""
        path = str(self.path.expanduser().absolute())
        if not self.first_row and self.end_row is None:
            return path
        return f"{path}@[{self.first_row or ''}:{'' if self.end_row is None else self.end_row}]"
