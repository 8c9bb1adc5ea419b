"""Joins puts: those that arrive while others are being sent share the next call.

One call for each put costs the buffer more than the put itself, and puts of one call share one sync of its disk.
A shared call that fails is repeated for each caller alone, so that no caller gets the error of another one's put.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.protobuf import put_request
from headrace.rpc import tracing

_CALLS_AT_ONCE = 2
"""One that the buffer works on, and one on its way."""
_ENOUGH_BYTES = 1 << 20
"""A call that has gathered this many bytes of puts is sent at once."""
_ENOUGH_GROUPS = 256

Send = Callable[[bytes, float], Awaitable[pb.PutGroupsResponse]]
"""(request, seconds until the deadline)."""


@dataclass(frozen=True, slots=True)
class _Put:
    request: bytes
    num_groups: int
    end: float
    results: asyncio.Future[Sequence[pb.PutResult]]
    spans: tracing.Contexts


class PutQueue:
    """Each response starts the next call."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[_Put] = deque()
        self._calls: dict[asyncio.Task[None], Sequence[_Put]] = {}

    async def put(self, puts: Sequence[pb.GroupPut], deadline_seconds: float) -> Sequence[pb.PutResult]:
        """One result for each put, in order. Raises the buffer's error for these puts."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_seconds
        put = _Put(put_request(puts), len(puts), end, loop.create_future(), tracing.current())
        self._waiting.append(put)
        self._start_calls()
        return await put.results

    async def close(self) -> None:
        """Cancels the calls and everyone who waits for them."""
        for put in self._waiting:
            put.results.cancel()
        self._waiting.clear()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _start_calls(self) -> None:
        while self._waiting and (len(self._calls) < _CALLS_AT_ONCE or self._is_full(self._waiting)):
            together = self._next()
            call = asyncio.create_task(self._call(together))
            self._calls[call] = together
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        for put in self._calls.pop(call):
            put.results.cancel()  # does nothing where it was answered
        self._start_calls()

    def _next(self) -> list[_Put]:
        together: list[_Put] = []
        while self._waiting and not self._is_full(together):
            together.append(self._waiting.popleft())
        return together

    @staticmethod
    def _is_full(puts: Collection[_Put]) -> bool:
        num_bytes = sum(len(put.request) for put in puts)
        return num_bytes >= _ENOUGH_BYTES or sum(put.num_groups for put in puts) >= _ENOUGH_GROUPS

    async def _call(self, together: Sequence[_Put]) -> None:
        seconds = min(put.end for put in together) - asyncio.get_running_loop().time()
        try:
            tracing.adopt(tuple(context for put in together for context in put.spans))
            reply = await self._send(b"".join(put.request for put in together), seconds)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for the callers
            if len(together) > 1:
                await asyncio.gather(*(self._call([put]) for put in together))
            elif not together[0].results.done():
                together[0].results.set_exception(error)
        else:
            results = iter(reply.results)
            for put in together:
                own = list(islice(results, put.num_groups))
                if not put.results.done():  # nobody waits for it any more
                    put.results.set_result(own)
