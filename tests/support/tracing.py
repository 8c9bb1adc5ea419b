"""Tracing inside a test's own process, which stands for one process of a run after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.rpc import tracing

Begin = Callable[..., Path]
RUN = "a-run"


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, run: Path) -> Iterator[Begin]:
    """Gives what begins to trace as a process of the run in this folder; nothing is traced when the block has ended."""
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_tracer", None)
        patch.setenv(tracing._VARIABLE, "")

        def begin(ratio: float = 1.0, process: str = "rollout-1") -> Path:
            tracing.start(process, run / "traces", run=RUN, ratio=ratio)
            return run / "traces" / f"{process}.jsonl"

        yield begin
