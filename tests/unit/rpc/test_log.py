"""What a server's log has of gRPC's own."""

from __future__ import annotations

import logging

import grpc
import pytest

from headrace.rpc.log import configure_logging


def test_a_caller_that_leaves_while_its_answer_is_sent_writes_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("test")
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    for error in (grpc._cython.cygrpc.ExecuteBatchError("a caller left"), RuntimeError("of the server")):
        try:
            raise error
        except Exception:
            grpcs.exception("raised by servicer method")
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
