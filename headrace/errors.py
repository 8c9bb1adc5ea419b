"""Every error that crosses a wire, as one tree. Each class has its gRPC status and a reason for programs.

HeadraceError
├── InvalidArgument        INVALID_ARGUMENT     the request is wrong; retrying cannot help
│   └── ConfigError        (never on the wire)  a job file or flag is wrong
├── NotFound               NOT_FOUND
├── AlreadyExists          ALREADY_EXISTS       same key, other content
├── FailedPrecondition     FAILED_PRECONDITION  right request, wrong moment
│   ├── GroupGone          reason GROUP_GONE    engines were started again since they joined it
│   ├── BaseGone           reason BASE_GONE     engines lack the weights that a delta changes
│   └── NothingToLearn     (never on the wire)  too many samples fail: a person has to mend something
├── Aborted                ABORTED
│   ├── Fenced             reason FENCED        a newer trainer owns the ledger
│   └── PublicationAborted reason PUBLICATION_ABORTED
├── OutOfRange             OUT_OF_RANGE
├── Unauthenticated        UNAUTHENTICATED      the server does not know who calls
├── PermissionDenied       PERMISSION_DENIED    it does, and the caller's role may not call this
├── ResourceExhausted      RESOURCE_EXHAUSTED   a limit; RetryInfo says when to come back
│   └── DiskFull           reason DISK_FULL     what was asked for is kept as soon as there is space
├── Unavailable            UNAVAILABLE          not now; RetryInfo says when to come back
├── DeadlineExceeded       DEADLINE_EXCEEDED
├── DataLoss               DATA_LOSS
│   └── ChecksumMismatch   reason CHECKSUM_MISMATCH
└── Internal               INTERNAL             a bug of ours; details are in the server's log

A message names the value and the way out. `headrace.rpc` maps the tree to `google.rpc.Status` and back, so a client
catches the class that the server raised.
"""

from __future__ import annotations

import re
from typing import ClassVar


class HeadraceError(Exception):
    """Base of all: `message` for people, `reason` for programs, `metadata` for both."""

    status: ClassVar[str] = "UNKNOWN"
    """The name of its gRPC status, which `headrace.rpc.status` turns into the code"""

    def __init__(self, message: str, *, reason: str | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or _upper_snake(type(self).__name__)
        self.metadata = metadata


class InvalidArgument(HeadraceError):
    """The request is wrong in itself; `field` is the path of the offending field, if one is."""

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str | None = None, reason: str | None = None, **metadata: str) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.field = field


class ConfigError(InvalidArgument):
    """A job file, flag or environment variable is wrong."""


class NotFound(HeadraceError):
    """The named thing does not exist."""

    status = "NOT_FOUND"


class AlreadyExists(HeadraceError):
    """The same key was used before with another content."""

    status = "ALREADY_EXISTS"


class FailedPrecondition(HeadraceError):
    """The request is valid, but not in the current state."""

    status = "FAILED_PRECONDITION"


class GroupGone(FailedPrecondition):
    """A weight group's engines are not the ones that joined it: begin with another group."""


class BaseGone(FailedPrecondition):
    """Engines lack the weights that a delta changes: send the whole."""


class NothingToLearn(FailedPrecondition):
    """Too many samples failed for too long; another start would fail in the same way."""


class Aborted(HeadraceError):
    """The operation was ended by another party."""

    status = "ABORTED"


class Fenced(Aborted):
    """The caller's epoch is over: a newer trainer owns the ledger. Stop."""


class PublicationAborted(Aborted):
    """The publication was aborted; begin another."""


class OutOfRange(HeadraceError):
    """The position is outside of what the server keeps."""

    status = "OUT_OF_RANGE"


class Unauthenticated(HeadraceError):
    """The caller has not shown who it is."""

    status = "UNAUTHENTICATED"


class PermissionDenied(HeadraceError):
    """The caller's role may not call the method."""

    status = "PERMISSION_DENIED"


class RetryableError(HeadraceError):
    """The server has done nothing; try again after `retry_after_seconds`."""

    def __init__(
        self, message: str, *, retry_after_seconds: float = 1.0, reason: str | None = None, **metadata: str
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after_seconds = retry_after_seconds


class ResourceExhausted(RetryableError):
    """A limit is reached; the message says which and how to raise it."""

    status = "RESOURCE_EXHAUSTED"


class DiskFull(ResourceExhausted):
    """The server's disk has no room for what it must keep: the message names the folder and what frees it."""


class Unavailable(RetryableError):
    """The server cannot answer now."""

    status = "UNAVAILABLE"


class DeadlineExceeded(HeadraceError):
    """The call took longer than the caller allowed."""

    status = "DEADLINE_EXCEEDED"


class DataLoss(HeadraceError):
    """Stored or sent bytes have changed."""

    status = "DATA_LOSS"


class ChecksumMismatch(DataLoss):
    """Two sides computed different checksums over what must be the same."""


class Internal(HeadraceError):
    """A bug on the server's side."""

    status = "INTERNAL"


def _upper_snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def error_classes() -> list[type[HeadraceError]]:
    """The classes of this module, base first. A service's own subclass arrives at the client as its base class."""
    found: list[type[HeadraceError]] = [HeadraceError]
    for cls in found:
        found.extend(each for each in cls.__subclasses__() if each.__module__ == __name__)
    return found
