"""Decides who may ask the endpoint: the roles of gRPC's callers.

A caller shows a certificate, or sends a token as OpenAI's clients send their key: `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from headrace.api.rollout.v1 import rollout_pb2
from headrace.errors import DeadlineExceeded, InvalidArgument, PermissionDenied, Unauthenticated
from headrace.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_BODY_SECONDS
from headrace.rpc.access import AUTHORIZATION, Access
from headrace.rpc.log import log

PEER = "peer"
"""The key of what the connection's certificate says, in the state of a request."""

_SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
_OPEN = Access(has_certificates=False, tokens=None)


class Gate:
    """Refuses a request before its body is read."""

    def __init__(self, access: Access = _OPEN) -> None:
        self._access = access

    async def body(self, request: Request, rpc: str, *, has_key: bool) -> bytes:
        """The request's body, once its caller is allowed. `has_key`: the address itself is the key.

        Raises Unauthenticated, PermissionDenied, InvalidArgument or DeadlineExceeded.
        """
        if not (has_key or self._access.is_open):
            self._require_allowed(request, rpc)
        return await _body(request)

    def _require_allowed(self, request: Request, rpc: str) -> None:
        shown = request.scope.get("state", {}).get(PEER, {})
        tokens = [(AUTHORIZATION, value) for value in request.headers.getlist(AUTHORIZATION)]
        caller = self._access.caller(shown, tokens)
        try:
            self._access.require(caller, _SERVICE, rpc)
        except (Unauthenticated, PermissionDenied) as error:
            log.info("openai_refused", caller=caller.name, role=caller.role, path=request.url.path, reason=error.reason)
            if isinstance(error, Unauthenticated):
                raise Unauthenticated(f"{error.message}; OpenAI's clients send it as api_key") from error
            raise


async def _body(request: Request) -> bytes:
    if coding := request.headers.get("content-encoding"):
        raise InvalidArgument(f"Content-Encoding {coding[:40]}: send the JSON as it is", reason="CONTENT_ENCODING")
    if (length := request.headers.get("content-length", "")).isdigit():
        _require_size(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_HTTP_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                _require_size(len(body))
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the body did not end within {MAX_HTTP_BODY_SECONDS:g} s: it had {len(body):,} bytes by then",
            reason="REQUEST_TOO_SLOW",
        ) from error
    return bytes(body)


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_HTTP_BODY_BYTES:
        raise InvalidArgument(
            f"the request has {num_bytes:,} bytes or more, may have {MAX_HTTP_BODY_BYTES:,}", reason="BODY_TOO_LARGE"
        )
