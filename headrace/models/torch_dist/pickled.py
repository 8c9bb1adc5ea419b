"""Reads a stranger's pickle as data: what it names is never imported, and nothing of it is run.

A pickle builds objects by naming callables. Here a name that the file's format has is answered with a `StandIn`, which
keeps what it is given and does nothing; another name is refused. So a pickle can build lists, dicts and stand-ins only.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ConfigError

Resolve = Callable[[str, str], Any]
"""What stands for a module's name; None refuses it."""
_SHOWN = 200


class StandIn:
    """Stands for an object: what its class would have been called with, and its state."""

    def __new__(cls, *args: Any, **_: Any) -> StandIn:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing reads the items of a subclass of dict."""

    def append(self, value: Any) -> None:
        """Nothing reads the items of a subclass of list."""

    def extend(self, values: Any) -> None:
        """Ignores the values, as `append` does."""

    def field(self, name: str) -> Any:
        """A field of the object, None without one."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path, resolve: Resolve) -> None:
        super().__init__(file)
        self._path = path
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._resolve(module, name)) is None:
            raise ConfigError(
                f"{self._path} asks for {module[:_SHOWN]}.{name[:_SHOWN]}, which no checkpoint of Megatron-core holds: "
                "nothing of it was run; do not trust this folder, and get the checkpoint from another place"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return None  # a tensor's storage, which nobody asks for


def read_pickle(file: BinaryIO, path: Path, resolve: Resolve) -> Any:
    """The pickle's content. Raises ConfigError that names `path`, and the class where `resolve` refuses it."""
    try:
        return _Reader(file, path, resolve).load()
    except ConfigError:
        raise
    except Exception as error:  # bytes from anywhere may fail in any way, and nothing but stand-ins was built
        raise ConfigError(f"{path} is damaged: {type(error).__name__} {str(error)[:_SHOWN]}: copy it again") from error
