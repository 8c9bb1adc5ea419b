"""Wraps every call on a server: receiving, decoding, deadline, logging, counting, and the mapping of errors.

It receives requests in place of gRPC, which would wait for one that never ends, and answer nothing to a call that ends
without one. And it decodes them, because gRPC would answer UNKNOWN to bytes that do not parse and log nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from headrace.errors import DeadlineExceeded, HeadraceError, Internal, InvalidArgument, Unavailable
from headrace.limits import MAX_RECEIVE_SECONDS, MAX_REQUEST_BYTES
from headrace.rpc import tracing
from headrace.rpc.access import Access, Caller
from headrace.rpc.log import log
from headrace.rpc.net import Address, require_free
from headrace.rpc.status import DETAILS_KEY, code_of, to_status
from headrace.rpc.tls import TlsFolder, renew_at_handshakes

_SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class RpcMetrics:
    """Calls by method and status, and how long they took. `registry` takes a service's own metrics too."""

    def __init__(self, in_progress: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        self._calls = Counter("headrace_rpc_calls", "Finished calls.", ["method", "code"], registry=self.registry)
        self._seconds = Histogram(
            "headrace_rpc_seconds", "Time in the server.", ["method"], buckets=_SECONDS_BUCKETS, registry=self.registry
        )

        calls = Gauge("headrace_rpc_in_progress", "Calls that have begun and not ended.", registry=self.registry)
        calls.set_function(in_progress)

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one finished call."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def serve(self, address: Address, tls: TlsFolder | None = None) -> int:
        """Shows `/metrics` over HTTP from a thread; returns the bound port. Raises Unavailable when it is taken.

        With `tls` over HTTPS, to clients with a certificate; raises ConfigError for files of no use.
        """
        require_free(address)
        if tls is None:
            self._server, _ = start_http_server(address.port, address.host, self.registry)
            return self._server.server_port
        tls.read()
        self._server, _ = start_http_server(
            address.port,
            address.host,
            self.registry,
            certfile=str(tls.certificate),
            keyfile=str(tls.key),
            client_cafile=str(tls.authority),
            client_auth_required=True,
        )
        listening = self._server.socket
        assert isinstance(listening, ssl.SSLSocket)
        renew_at_handshakes(listening.context, tls)
        # In the thread of its connection, so that all others need not wait for a client that does not finish its own.
        listening.do_handshake_on_connect = False  # type: ignore[attr-defined]  # the stubs forget it
        return self._server.server_port

    def stop(self) -> None:
        """Shows them no more, within half a second. Does nothing where they are not shown."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


# The calls that a server is answering, so that those it cannot finish get an answer when it ends.
#
# gRPC would cancel them, and a client that sees CANCELLED does not know that it may ask again.

_RETRY_SECONDS = 0.1


class CallsInProgress:
    """Each call is a task of gRPC's."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[object], str] = {}
        self._ended: set[asyncio.Task[object]] = set()
        self._ending: Collection[str] | None = ()

    @property
    def count(self) -> int:
        return len(self._methods)

    @contextmanager
    def one(self, method: str) -> Iterator[None]:
        """Raises Unavailable inside of the block once `end` was called for the method."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_ending(method):
            raise _ending(method)
        self._methods[task] = method
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if task not in self._ended:
                raise
            task.uncancel()
            raise _ending(method) from cancelled
        finally:
            del self._methods[task]
            self._ended.discard(task)

    def end(self, methods: Collection[str] | None = None) -> None:
        """Ends the calls of these methods, or all, and those that come from now on."""
        self._ending = methods
        for task, method in self._methods.items():
            if self._is_ending(method):
                self._ended.add(task)
                task.cancel()

    def _is_ending(self, method: str) -> bool:
        return self._ending is None or method in self._ending


def _ending(method: str) -> Unavailable:
    return Unavailable(
        f"the server ends, and {method} with it: ask again, which waits until it is back",
        retry_after_seconds=_RETRY_SECONDS,
        reason="SERVER_ENDS",
    )


MAX_CALL_SECONDS = 600.0
"""No call with one answer takes longer, also not one of a caller that sets no deadline, as curl-like tools do."""

Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps unary-unary and unary-stream handlers of the given services; all others pass untouched."""

    def __init__(
        self,
        services: frozenset[str],
        metrics: RpcMetrics,
        request_bytes: Mapping[str, int],
        gate: Callable[[], None],
        access: Access,
        calls: CallsInProgress,
    ) -> None:
        """`gate` raises what every call is to be answered now. `access` refuses callers before a request is decoded."""
        self._services = services
        self._metrics = metrics
        self._request_bytes = request_bytes
        self._gate = gate
        self._access = access
        self._calls = calls
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method in self._wrapped:
            return self._wrapped[details.method]
        handler = await continuation(details)
        if handler is not None:
            self._wrapped[details.method] = handler = self._wrap(handler, details.method)
        return handler

    def _wrap(self, handler: Any, path: str) -> Any:
        _, service, method = path.split("/")
        if service not in self._services or handler.request_streaming:
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler, service, method), None, None)
        behavior = self._unary(handler, service, method)
        return grpc.stream_unary_rpc_method_handler(behavior, None, handler.response_serializer)

    def _unary(self, handler: Any, service: str, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        decode = self._decoder(handler.request_deserializer, method)

        async def behavior(_: Any, context: Context) -> Any:
            caller = self._caller(context)
            with self._call(service, method, context, caller) as call:
                try:
                    self._allow(caller, service, method)
                    async with asyncio.timeout(seconds_left(context)):
                        with self._calls.one(method):
                            data = await _received(context, method)
                            return await handler.unary_unary(decode(data), context)
                except Exception as error:  # noqa: BLE001  # the RPC boundary: everything becomes a status
                    await call.abort(error)

        return behavior

    def _streaming(self, handler: Any, service: str, method: str) -> Callable[[Any, Context], Awaitable[None]]:
        """Writes the replies: gRPC keeps the last one of a generator until the next, for which a watch waits long."""
        decode = self._decoder(handler.request_deserializer, method)

        async def behavior(_: Any, context: Context) -> None:
            caller = self._caller(context)
            with self._call(service, method, context, caller) as call:
                try:
                    self._allow(caller, service, method)
                    with self._calls.one(method):
                        data = await _received(context, method)
                        async for reply in handler.unary_stream(decode(data), context):
                            await context.write(handler.response_serializer(reply))
                            del reply
                except Exception as error:  # noqa: BLE001  # the RPC boundary: everything becomes a status
                    await call.abort(error)

        return behavior

    def _allow(self, caller: Caller | None, service: str, method: str) -> None:
        """Raises what this call is refused with before its request is read."""
        if caller is not None:
            self._access.require(caller, service, method)
        self._gate()

    def _caller(self, context: Context) -> Caller | None:
        """None where everybody may call everything."""
        if self._access.is_open:
            return None
        return self._access.caller(context.auth_context(), context.invocation_metadata() or ())

    def _call(self, service: str, method: str, context: Context, caller: Caller | None) -> _Call:
        named = {"caller": caller.name, "role": caller.role} if caller else {}
        return _Call(service, method, context, self._metrics, {"rpc": method, **named})

    def _decoder(self, deserializer: Any, method: str) -> Callable[[bytes], Any]:
        most_bytes = self._request_bytes.get(method, MAX_REQUEST_BYTES)

        def decode(data: bytes) -> Any:
            if len(data) > most_bytes:
                raise InvalidArgument(
                    f"the request has {len(data)} bytes, may have {most_bytes}: make several calls of it",
                    reason="TOO_LARGE",
                    limit=str(most_bytes),
                )
            try:
                return deserializer(data)
            except DecodeError as error:
                raise InvalidArgument(
                    f"the request's {len(data)} bytes are not the message this method takes: {error}",
                    reason="MALFORMED_REQUEST",
                ) from error

        return decode


def seconds_left(context: Context) -> float:
    """Returns the time until the caller's deadline, or until the limit of a caller that has set none."""
    remaining = context.time_remaining()
    return MAX_CALL_SECONDS if remaining is None else min(remaining, MAX_CALL_SECONDS)


async def _received(context: Context, method: str) -> bytes:
    """The request's bytes. Raises DeadlineExceeded for one that does not end, InvalidArgument where there is none."""
    try:
        async with asyncio.timeout(MAX_RECEIVE_SECONDS):
            data = await context.read()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the request of {method} did not arrive within {MAX_RECEIVE_SECONDS:g} s: send it in smaller parts, or "
            "fewer at once"
        ) from error
    if not isinstance(data, bytes):
        raise InvalidArgument(f"the call of {method} ended without a request", reason="MALFORMED_REQUEST")
    return data


class _Call:
    """One call: its log context, its span, its time and its end."""

    __slots__ = ("_code", "_context", "_logged", "_method", "_metrics", "_span", "_started")

    def __init__(
        self, service: str, method: str, context: Context, metrics: RpcMetrics, logged: Mapping[str, str]
    ) -> None:
        callers = tracing.received(context.invocation_metadata() or ()) if tracing.is_on() else ()
        self._span = tracing.span(f"{service}/{method}", callers, {"rpc.system": "grpc"})
        self._logged = logged
        self._method = method
        self._context = context
        self._metrics = metrics
        self._started = time.monotonic()
        self._code = grpc.StatusCode.OK

    def __enter__(self) -> _Call:
        structlog.contextvars.bind_contextvars(**self._logged)
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is asyncio.CancelledError:
            self._code = grpc.StatusCode.CANCELLED
        self._span.__exit__(kind, error, trace)
        self._metrics.observe(self._method, self._code.name, time.monotonic() - self._started)

    async def abort(self, error: Exception) -> None:
        """Answers the error's status. An exception outside of the tree is a bug: logged, and INTERNAL.

        A caller that has gone, or whose deadline was first, hears nothing: gRPC cannot write to it any more.
        """
        if isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        if isinstance(error, TimeoutError):
            error = DeadlineExceeded(
                f"{self._method} did not finish within its deadline: give it more time or less work"
            )
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if not isinstance(error, HeadraceError):
            log.error("call_failed", exc_info=error)
            error = Internal(
                f"{self._method} failed with {type(error).__name__}: {error}; the server's log has the rest"
            )
            status = to_status(error)
        else:
            status = to_status(error)
            log.info("call_refused", code=error.status, reason=error.reason[:64], message=status.message)
        self._code = code_of(error)
        trailer = ((DETAILS_KEY, status.SerializeToString()),)
        try:
            await self._context.abort(self._code, status.message, trailer)
        except grpc.aio.InternalError as gone:
            raise asyncio.CancelledError from gone
