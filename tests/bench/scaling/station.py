"""The two kinds of servers: a station serves one thing at a time on each server, engines serve all at once, slower."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

import simpy

from tests.bench.scaling.costs import Costs

_ALMOST = 1e-6
"""Tokens: a response that lacks less is complete."""


class Station:
    """First come, first served, on equal servers."""

    def __init__(self, env: simpy.Environment, num_servers: int = 1) -> None:
        self._env = env
        self._free_at = [0.0] * num_servers
        self.busy_seconds = 0.0
        self.waited_seconds = 0.0
        self.num_served = 0

    def serve(self, seconds: float) -> simpy.Event:
        """Happens when a server that was free first has worked for so long on this."""
        begin = max(self._env.now, self._free_at[0])
        heapq.heapreplace(self._free_at, begin + seconds)
        self.busy_seconds += seconds
        self.waited_seconds += begin - self._env.now
        self.num_served += 1
        return self._env.timeout(begin + seconds - self._env.now)

    @property
    def done_seconds(self) -> float:
        """Work that is done now, of all servers."""
        return self.busy_seconds - sum(max(0.0, at - self._env.now) for at in self._free_at)


@dataclass(order=True)
class _Request:
    ends_at: float
    number: int
    done: simpy.Event = field(compare=False)


class Engines:
    """Engines behind one router that divides requests evenly; the more there are, the longer takes a token of each."""

    def __init__(self, env: simpy.Environment, num_gpus: float, costs: Costs) -> None:
        self._env, self._gpus, self._costs = env, num_gpus, costs
        self._slots = max(1, round(num_gpus * costs.requests_per_gpu))
        self._running: list[_Request] = []
        self._waiting: deque[tuple[float, simpy.Event]] = deque()
        self._numbers = itertools.count()
        self._served = 0.0
        self._as_of = 0.0
        self._timer_at = float("inf")
        self._standing = False
        self.num_tokens = 0.0

    def generate(self, num_tokens: float) -> simpy.Event:
        """Happens when a response of so many tokens is complete."""
        self._advance()
        done = self._env.event()
        self._waiting.append((num_tokens, done))
        self._fill()
        return done

    def stand_still(self) -> None:
        """No engine generates until `go_on`; requests keep their tokens."""
        self._advance()
        self._standing = True

    def go_on(self) -> None:
        self._advance()
        self._standing = False
        self._fill()

    def tokens_now(self) -> float:
        """Tokens generated so far, also of responses that are not complete."""
        self._advance()
        return self.num_tokens

    @property
    def _rate(self) -> float:
        """Tokens a second of each request."""
        if self._standing or not self._running:
            return 0.0
        each = max(1.0, len(self._running) / self._gpus)  # a request alone is on one GPU
        return 1.0 / (self._costs.token_base + each * self._costs.token_each)

    def _advance(self) -> None:
        tokens = (self._env.now - self._as_of) * self._rate
        self._served += tokens
        self.num_tokens += tokens * len(self._running)
        self._as_of = self._env.now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            num_tokens, done = self._waiting.popleft()
            heapq.heappush(self._running, _Request(self._served + num_tokens, next(self._numbers), done))
        if not (rate := self._rate):
            return
        due = self._env.now + max(0.0, self._running[0].ends_at - self._served) / rate
        if due < self._timer_at:  # an earlier timer finds nothing to do, and sets the next
            self._timer_at = due
            timer = self._env.timeout(due - self._env.now)
            timer.callbacks.append(lambda _: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._timer_at:
            self._timer_at = float("inf")
        self._advance()
        while self._running and self._running[0].ends_at <= self._served + _ALMOST:
            heapq.heappop(self._running).done.succeed()
        self._fill()
