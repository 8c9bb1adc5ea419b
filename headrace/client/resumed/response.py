"""A response that outlives the service that streams it: the rest of it is asked for with the tokens that are there."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import Unavailable
from headrace.rpc.retry import Backoff
from headrace.wire.column import pack_column, unpack_column

Ask = Callable[[pb.GenerateRequest, float], AsyncGenerator[pb.GenerateResponse]]
"""(request, seconds until the deadline)."""

_NOT_CONTINUED = frozenset({"CANNOT_CONTINUE", "WEIGHTS_REFUSED"})
"""Reasons for which the tokens that are there are of no use."""


class _Responses:
    """Holds the tokens that came of each response to one request."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._num_responses = max(1, request.n)
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()

    @property
    def have_ended(self) -> bool:
        return len(self._ended) == self._num_responses

    @property
    def have_begun(self) -> bool:
        return bool(self._ended) or any(self._tokens.values())

    def left(self) -> Iterator[tuple[pb.GenerateRequest, int]]:
        """Yields each request to make now, and the index of its first response."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.return_tokens = True
        if not self.have_begun:
            yield request, 0
            return
        known = unpack_column(self._request.begun).tolist() if self._request.HasField("begun") else []
        for index in sorted(set(range(self._num_responses)) - self._ended):
            of_one = pb.GenerateRequest()
            of_one.CopyFrom(request)
            of_one.n = 1
            if index and of_one.sampling.HasField("seed"):
                of_one.sampling.seed += index
            of_one.begun.CopyFrom(pack_column("tokens", np.asarray([*known, *self._tokens[index]], dtype=np.int32)))
            yield of_one, index

    def add(self, reply: pb.GenerateResponse) -> pb.GenerateResponse:
        """The message as the reader asked for it."""
        if reply.HasField("tokens"):
            self._tokens[reply.index] += unpack_column(reply.tokens).tolist()
        if reply.status:
            self._ended.add(reply.index)
        if not self._request.return_tokens:
            reply.ClearField("tokens")
            reply.ClearField("log_probs")
        return reply


async def whole_response(
    request: pb.GenerateRequest, ask: Ask, *, deadline_seconds: float
) -> AsyncGenerator[pb.GenerateResponse]:
    """The messages of all of the request's responses, though a service may end meanwhile.

    Raises Unavailable at the deadline, and at once for a response that cannot be continued: one that follows a schema
    or a regular expression, once there is some of it.
    """
    end, backoff = time.monotonic() + deadline_seconds, Backoff()
    responses = _Responses(request)
    while not responses.have_ended:
        try:
            for asked, index in responses.left():
                replies = ask(asked, max(end - time.monotonic(), 0.0))
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        reply.index += index
                        backoff.reset()
                        yield responses.add(reply)
            if not responses.have_ended:
                raise Unavailable("the stream ended before its response: ask again")
        except Unavailable as error:
            if time.monotonic() >= end or not _may_go_on(request, responses, error):
                raise
            await backoff.sleep(error, at_most=end - time.monotonic())


def _may_go_on(request: pb.GenerateRequest, responses: _Responses, error: Unavailable) -> bool:
    if not responses.have_begun:
        return True
    is_constrained = bool(request.sampling.json_schema or request.sampling.regex)
    return not is_constrained and error.reason not in _NOT_CONTINUED
