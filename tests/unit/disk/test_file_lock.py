"""Commands that change who may call, at once: none undoes what another has said that it did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.disk import file_lock
from headrace.errors import ConfigError
from headrace.rpc.access import Role, add_token, revoke_token, tokens_in

NAMES = [f"client-{number}" for number in range(24)]


def at_once(change: Callable[[str], Any], names: Iterable[str] = NAMES) -> None:
    with ThreadPoolExecutor(8) as hands:
        list(hands.map(change, names))


def test_every_token_that_was_added_is_there_and_none_that_was_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    for name in NAMES:
        add_token(file, f"old-{name}", Role.VIEWER)

    def replace(name: str) -> None:
        revoke_token(file, f"old-{name}")
        add_token(file, name, Role.VIEWER)

    at_once(replace)
    assert set(tokens_in(file)) == set(NAMES)


def test_who_waits_too_long_is_told_and_a_command_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    if (pid := os.fork()) == 0:
        with file_lock(file):
            os._exit(0)
    os.waitpid(pid, 0)
    said = r"another command has been changing .*tokens\.json for 0.1 s: end it"
    with file_lock(file), pytest.raises(ConfigError, match=said), file_lock(file, 0.1):
        pass
    add_token(file, "eve", Role.VIEWER)
