"""Machines with bubblewrap, and such as have none."""

from __future__ import annotations

import functools

import pytest

from headrace.hooks.kit import sandbox

KINDS = ("bubblewrap", "process")


def choose_sandbox(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test's programs in bubblewrap, or as processes on a machine without one; "refused" as in neither."""
    for name in ("_bubblewrap", "_trouble_of_processes", "sandbox_of"):  # some are found out once a process
        if (known := getattr(sandbox, name, None)) is not None and hasattr(known, "__wrapped__"):
            monkeypatch.setattr(sandbox, name, functools.cache(known.__wrapped__))
    monkeypatch.setenv("HEADRACE_INSECURE_SANDBOX", "true" if kind == "process" else "false")
    if kind != "bubblewrap":
        monkeypatch.setattr(sandbox, "_executables", list, raising=False)
    elif sandbox.sandbox_of() != "bubblewrap":
        pytest.skip("this machine lets nobody make namespaces")
