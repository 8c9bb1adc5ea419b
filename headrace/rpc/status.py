"""The error tree to `google.rpc.Status` and back, so that a client catches the class that the server raised.

A status travels in HTTP/2 trailers, of which gRPC takes 8 KiB: a longer one would arrive as RESOURCE_EXHAUSTED. So the
message is cut to 2 KiB as it is encoded there (a byte outside of ASCII takes three), and so are its details.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from headrace.errors import HeadraceError, InvalidArgument, RetryableError, error_classes
from headrace.limits import MAX_ERROR_BYTES

M = TypeVar("M", bound=Message)

DOMAIN = "headrace"
DETAILS_KEY = "grpc-status-details-bin"

_DETAIL_BYTES = 160
_MAX_METADATA = 4
_CUT = "... (cut)"


def to_status(error: HeadraceError) -> status_pb2.Status:
    """ErrorInfo always; BadRequest where a field is at fault; RetryInfo where it pays to come back."""
    message = cut(error.message, MAX_ERROR_BYTES)
    metadata = list(error.metadata.items())[:_MAX_METADATA]
    info = error_details_pb2.ErrorInfo(
        reason=cut(error.reason, _DETAIL_BYTES),
        domain=DOMAIN,
        metadata={cut(key, _DETAIL_BYTES): cut(value, _DETAIL_BYTES) for key, value in metadata},
    )
    details: list[Any] = [_pack(info)]
    if isinstance(error, InvalidArgument) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field, _DETAIL_BYTES), description=cut(error.message, _DETAIL_BYTES)
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, RetryableError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(_pack(retry))
    return status_pb2.Status(code=code_pb2.Code.Value(error.status), message=message, details=details)


def code_of(error: HeadraceError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def cut(text: str, most: int) -> str:
    """The text as a header can carry it: `most` bytes at most when it is percent-encoded, no lone surrogates."""
    text = text[: most + 1].encode("utf-8", "replace").decode()
    if _encoded_length(text) <= most:
        return text
    left, kept = most - len(_CUT), []
    for character in text:
        left -= _encoded_length(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept) + _CUT


def _encoded_length(text: str) -> int:
    return sum(1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in text.encode())


def from_rpc_error(error: grpc.aio.AioRpcError) -> HeadraceError:
    """The class with the same reason, else the plainest class with the same status.

    Its `retry_after_seconds` is 0 where the server said nothing, as of a connection that broke.
    """
    status = _status_of(error)
    message = error.details() or error.code().name
    reason, metadata, field, retry_after = None, {}, None, 0.0
    for packed in status.details:
        if info := _unpack(packed, error_details_pb2.ErrorInfo):
            reason, metadata = info.reason, dict(info.metadata)
        elif bad := _unpack(packed, error_details_pb2.BadRequest):
            field = bad.field_violations[0].field
        elif retry := _unpack(packed, error_details_pb2.RetryInfo):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    cls = _class_for(error.code(), reason)
    if issubclass(cls, InvalidArgument):
        return cls(message, field=field, reason=reason, **metadata)
    if issubclass(cls, RetryableError):
        return cls(message, retry_after_seconds=retry_after, reason=reason, **metadata)
    return cls(message, reason=reason or error.code().name, **metadata)


def _class_for(code: grpc.StatusCode, reason: str | None) -> type[HeadraceError]:
    candidates = [cls for cls in error_classes() if cls.status == code.name]
    for cls in candidates:
        if cls("").reason == reason:
            return cls
    return candidates[0] if candidates else HeadraceError


def details_of(error: grpc.aio.AioRpcError) -> bytes | None:
    """The status that a server of ours put into its trailer; None for an error that gRPC on this side says."""
    trailer: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]  # stubs
    return next((value for key, value in trailer if key == DETAILS_KEY and isinstance(value, bytes)), None)


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    try:
        return status_pb2.Status.FromString(details_of(error) or b"")
    except DecodeError:
        return status_pb2.Status()  # a stranger's trailer: the plain code and message still stand


def _pack(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _unpack(packed: Any, kind: type[M]) -> M | None:
    message = kind()
    return message if packed.Unpack(message) else None
