"""The weights in the engines, by the names with which they are stamped.

  PENDING ──► ACCEPTED   the publication was committed: tokens with the name are of its policy version
     └──────► REFUSED    checksums or the probe failed, or the engine was lost before the verdict
Each name is used once: for one engine in one attempt to publish. So a later good version is never mistaken for a
refused one, and tokens that an engine sampled before its own verdict are held back until the verdict.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from headrace.trajectory import PolicyRange
from services.rollout.engine.replies import BadAnswer, NamedSpan

INITIAL_VERSION = 0
"""The policy version of hf_checkpoint's weights."""

# A request in flight may carry names of earlier publications; one that lived through more of them is made again.
_REMEMBERED = 1 << 14


class Verdict(StrEnum):
    """The state of the weights behind a name."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(slots=True)
class _Named:
    policy_version: int
    engine_id: str
    verdict: Verdict = Verdict.PENDING


class ServedWeights:
    """`policy_version` is the version with which new samples are generated; `refusals` counts refused names."""

    def __init__(self) -> None:
        self.policy_version = INITIAL_VERSION
        self.refusals = 0
        self.cache_key = f"v{INITIAL_VERSION}"
        """Keeps prefixes of different weights apart, also of weights that are not accepted yet."""
        self.adapter = ""
        """The adapter that is served on top of the engines' own weights; empty where there is none."""
        self._adapters_in_use: Counter[str] = Counter()
        self._adapter_left = asyncio.Event()
        self._cached_version = INITIAL_VERSION
        self._named: dict[str, _Named] = {}
        self._pending: set[str] = set()
        self._verdict_given = asyncio.Event()

    def new_name(self, policy_version: int, engine_id: str) -> str:
        """Returns a PENDING name for one engine's weights."""
        name = f"{policy_version}.{secrets.token_hex(4)}.{engine_id}"
        self._named[name] = _Named(policy_version, engine_id)
        self._pending.add(name)
        while len(self._named) > _REMEMBERED and (oldest := next(iter(self._named))) not in self._pending:
            del self._named[oldest]
        return name

    def name_adapter(self, name: str) -> None:
        """Tokens of an adapter that requests name, which is no version of the policy."""
        self._named[name] = _Named(INITIAL_VERSION, "", Verdict.ACCEPTED)

    def serve_adapter(self, name: str, policy_version: int) -> str:
        """Requests that begin from now on use it, and their tokens are of this version. Returns the former one."""
        former, self.adapter = self.adapter, name
        self._named[name] = _Named(policy_version, "", Verdict.ACCEPTED)
        return "" if former == name else former

    @contextmanager
    def using_adapter(self) -> Iterator[str]:
        """The served adapter, for one request: it stays in the engines until the block has ended."""
        adapter = self.adapter
        self._adapters_in_use[adapter] += 1
        try:
            yield adapter
        finally:
            self._adapters_in_use[adapter] -= 1
            if not self._adapters_in_use[adapter]:
                del self._adapters_in_use[adapter]
                self._adapter_left.set()
                self._adapter_left = asyncio.Event()

    async def unused(self, adapter: str) -> None:
        """Returns once no request uses this adapter, which is not served any more."""
        while adapter in self._adapters_in_use:
            await self._adapter_left.wait()

    def cache_apart(self, policy_version: int) -> None:
        """Engines go on with other weights: what they cached with any before is not used again."""
        self.cache_key, self._cached_version = f"v{policy_version}.{secrets.token_hex(4)}", policy_version

    def accept(self, names: Iterable[str]) -> None:
        """Makes tokens with these names count as the names' policy version."""
        for name in names:
            self._decide(name, Verdict.ACCEPTED)

    def refuse(self, name: str) -> None:
        """Makes tokens with this name unusable. It does nothing unless the name is PENDING."""
        if name in self._pending:
            self.refusals += 1
            self._decide(name, Verdict.REFUSED)

    def switch_to(self, policy_version: int) -> None:
        """Serves this version from now on. Higher versions are refused: their trainer restarted before them."""
        self.policy_version = policy_version
        if policy_version != self._cached_version:
            self.cache_key, self._cached_version = f"v{policy_version}", policy_version
        for named in self._named.values():
            if named.policy_version > policy_version and named.verdict is Verdict.ACCEPTED:
                named.verdict = Verdict.REFUSED
                self.refusals += 1

    def engine_of(self, name: str) -> str | None:
        """Returns the engine that was given the name, or None."""
        return (self._named[name].engine_id or None) if name in self._named else None

    async def wait_for_verdicts(self) -> None:
        """Returns when no verdict is pending."""
        while self._pending:
            await self._verdict_given.wait()

    async def version_of(self, name: str) -> int | None:
        """Returns the policy version behind a name, once there is a verdict; None for refused weights.

        Raises BadAnswer for an unknown name.
        """
        if name not in self._named:
            raise BadAnswer("unknown_version", f"weights named {name[:80]!r} were never published")
        while name in self._pending:
            await self._verdict_given.wait()
        named = self._named[name]
        return named.policy_version if named.verdict is Verdict.ACCEPTED else None

    async def ranges_of(self, spans: Sequence[NamedSpan]) -> tuple[PolicyRange, ...]:
        """Returns the spans with policy versions, up to the first token of refused weights, once all verdicts exist.

        Raises BadAnswer for unknown names, and for versions that decrease.
        """
        ranges: list[PolicyRange] = []
        for span in spans:
            version = await self.version_of(span.name)
            if version is None:
                break
            if ranges and version < ranges[-1].policy_version:
                raise BadAnswer("version_order", f"version {version} after {ranges[-1].policy_version}", span.name)
            ranges.append(PolicyRange(version, span.start, span.end))
        return _joined(ranges)

    def _decide(self, name: str, verdict: Verdict) -> None:
        self._named[name].verdict = verdict
        self._pending.discard(name)
        self._verdict_given.set()
        self._verdict_given = asyncio.Event()


def _joined(ranges: Sequence[PolicyRange]) -> tuple[PolicyRange, ...]:
    """Joins neighbours of one version: an engine can be given the served weights again."""
    joined: list[PolicyRange] = []
    for item in ranges:
        if joined and joined[-1].policy_version == item.policy_version:
            item = PolicyRange(item.policy_version, joined.pop().start, item.end)
        joined.append(item)
    return tuple(joined)
