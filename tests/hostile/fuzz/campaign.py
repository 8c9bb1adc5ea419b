"""One service under fire: calls in sequence from a seed, each answer held against the rules of every answer.

Rules: no INTERNAL, no UNKNOWN, no UNIMPLEMENTED; an error has its details (`google.rpc.Status` with ErrorInfo) and a
message of at most 2 KB. Deadlines are the caller's own doing. The server's log, health and memory are the test's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from tests.hostile.fuzz.spoiling import Spoiler
from tests.hostile.fuzz.templates import Memory, Templates
from tests.hostile.wire import Reply, Wire

CALL_SECONDS = 1.0
STREAM_SECONDS = 0.4
MOST_MESSAGE_CHARACTERS = 2048
_MOST_STREAMED = 20
_GIVES_UP_SHARE = 0.05
_OFTEN = {
    "CreateStream": 2,
    "SubmitPrompts": 2,
    "LeaseGroups": 3,
    "PutGroups": 4,
    "LeaseBatch": 2,
    "Score": 2,
    "Generate": 2,
}
"""What others need to get anywhere; once for every other method."""
_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
_WITHOUT_DETAILS = (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class Finding:
    """A call whose answer breaks a rule: enough to make it again."""

    seed: str
    number: int
    method: str
    rule: str
    reply: Reply
    data: bytes

    def __str__(self) -> str:
        request = self.data.hex() if len(self.data) <= 300 else f"{self.data[:100].hex()}… ({len(self.data)} bytes)"
        return (
            f"{self.method} (seed {self.seed}, call {self.number}): {self.rule}: {self.reply.code.name} "
            f"{self.reply.reason} {self.reply.message[:250]!r}\n  request {request}"
        )


@dataclass
class Campaign:
    """`run(count)` goes on where it was; findings and counts of (method, status) gather."""

    wire: Wire
    service: ServiceDescriptor
    seed: str
    folder: Path
    ends: frozenset[str] = frozenset()
    """Methods that end what is attacked: left out."""
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    memory: Memory = field(default_factory=Memory)
    _number: int = 0

    def __post_init__(self) -> None:
        self._random = Random(f"{self.service.name} {self.seed}")
        self._templates = Templates(self._random, self.memory, self.folder)
        self._spoiler = Spoiler(self._random)
        self._methods: Sequence[MethodDescriptor] = [
            m for m in self.service.methods if m.name not in self.ends for _ in range(_OFTEN.get(m.name, 1))
        ]

    async def run(self, count: int) -> None:
        """So many calls more."""
        for _ in range(count):
            self._number += 1
            method = self._random.choice(self._methods)
            request = self._templates.make(method)
            await self._call(method, self._spoiler.request(request))

    async def _call(self, method: MethodDescriptor, data: bytes) -> None:
        seconds = STREAM_SECONDS if method.server_streaming else CALL_SECONDS
        if self._random.random() < _GIVES_UP_SHARE:
            seconds = self._random.choice((0.001, 0.01))
        reply = await self.wire.send(method, data, seconds=seconds, most_messages=_MOST_STREAMED)
        self.counts[method.name, reply.code.name] += 1
        for message in reply.messages:
            self.memory.learn(message)
        rule = broken_rule(reply)
        if rule:
            self.findings.append(Finding(self.seed, self._number, method.name, rule, reply, data))
        if reply.code is grpc.StatusCode.UNAVAILABLE:
            await asyncio.sleep(0.2)  # it may have died: the test finds out


def broken_rule(reply: Reply) -> str | None:
    """Which rule the answer breaks."""
    if reply.code in _BUGS:
        return "a bug of the server reached its caller"
    if reply.code not in _WITHOUT_DETAILS and not reply.reason:
        return "an error without its details"
    if len(reply.message) > MOST_MESSAGE_CHARACTERS:
        return f"a message of {len(reply.message)} characters"
    return None


def by_kind(findings: Sequence[Finding]) -> list[str]:
    """The first finding of each kind, and how many there are."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        words = re.sub(r"[0-9]+|'[^']*'", "…", finding.reply.message[:80])
        kinds.setdefault((finding.method, words), []).append(finding)
    return [f"{len(same)} × {same[0]}" for same in kinds.values()]
