"""What a server's log has of gRPC's own, and what becomes of the work when nothing can be logged."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from headrace.rpc.log import configure_logging, cygrpc, log


def test_a_caller_that_leaves_while_its_answer_is_sent_writes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("test")
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    monkeypatch.setattr(grpcs, "disabled", False)  # a library that another test has loaded may have silenced it
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    kept: list[logging.LogRecord] = []
    collector = logging.Handler()
    collector.emit = kept.append  # type: ignore[method-assign]
    monkeypatch.setattr(grpcs, "handlers", [collector])
    for error in (cygrpc.ExecuteBatchError("a caller left"), RuntimeError("of the server")):
        try:
            raise error
        except Exception:  # noqa: BLE001  # what is logged may be anything
            grpcs.exception("raised by servicer method")
    (record,) = kept
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


def test_a_log_on_a_full_disk_fails_nobodys_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        with pytest.raises(OSError, match="No space left"):
            full.write("it is full\n")
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging("test")
        for number in range(10_000):
            log.error("rpc_failed", number=number)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
