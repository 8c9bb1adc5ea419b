"""A small file of tables beside the job's own: the data sets of eval_config, the engine groups of sglang_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError
from headrace.limits import did_you_mean, shown

_MAX_BYTES = 1 << 20

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TableFile:
    """Each method raises ConfigError, which names the option and the file."""

    option: str
    path: Path
    key: Callable[[Any], str] = shown
    """A key as a message has it."""

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self.option} {self.path}: {why}")

    def read(self) -> str:
        try:
            with self.path.expanduser().open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                self.refuse(f"it has more than {_MAX_BYTES} bytes, so it holds no tables of a job")
            return content.decode()
        except OSError as error:
            self.refuse(f"it cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            self.refuse(f"it is not text: {error}")

    def require_keys(self, where: str, table: Mapping[Any, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                self.refuse(f"{where}{self.key(key)} is unknown{did_you_mean(str(key), known)}")

    def require_table(self, where: str, table: Any) -> Mapping[str, Any]:
        if not isinstance(table, dict):
            self.refuse(f"{where} is {shown(table)}: write it as a mapping of keys to values")
        return table

    def validated(self, model: type[M], where: str, table: Mapping[Any, Any]) -> M:
        self.require_keys(f"{where}: ", table, tuple(model.model_fields))
        try:
            return model.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            what = "is missing" if first["type"] == "missing" else f"{first['msg']}, got {shown(first['input'])}"
            self.refuse(f"{where}: {key}: {what.removeprefix('Value error, ')}")
