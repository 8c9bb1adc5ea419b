"""Files that several commands change, each by reading it, changing it and writing it whole: one after the other.

Two at once would undo one another's change: a token that was revoked would be back with the next one that is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.disk.lock import NoLocks, lock
from headrace.errors import ConfigError


@contextmanager
def one_at_a_time(file: Path, wait_seconds: float = 10.0) -> Iterator[None]:
    """Keeps other commands from changing the file meanwhile, which takes milliseconds; a killed one's lock is free.

    Raises ConfigError where its folder cannot be written, and when another command goes on for `wait_seconds`.
    """
    try:
        opened = file.with_name(f".{file.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be changed: {file.parent}: {error.strerror}: name a folder that is there and that you can "
            "write to"
        ) from error
    with opened:
        with suppress(NoLocks):  # commands are then as alone as their users make them
            if not lock(opened, wait_seconds):
                raise ConfigError(
                    f"another command has been changing {file} for {wait_seconds:g} s: end it, and try again"
                )
        yield
