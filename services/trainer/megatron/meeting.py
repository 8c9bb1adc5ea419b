"""Ranks of machines that each start their own meet at rank 0's store, and compare what they were started with.

Rank 0 says its options. Every other rank says that it is here, or what differs. When all are here, or one is refused,
rank 0 says so to all, and the meeting is over: who comes later is told to come again. Until then a rank that died may
come again, and of two processes with the same rank the last one counts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from headrace.errors import ConfigError, DeadlineExceeded, HeadraceError, Unavailable
from headrace.rpc.net import Address

_OPTIONS, _REFUSED, _OVER = "headrace-options", "headrace-refused", "headrace-over"
_ASK_AGAIN_SECONDS = 0.1
_LAST_WORDS_SECONDS = 1.0
_MOST_NAMED = 3
_VERDICTS: Mapping[str, type[HeadraceError]] = {each.__name__: each for each in (ConfigError, DeadlineExceeded)}


class RankMeeting:
    """One rank's part. All methods wait, and raise torch.distributed's errors when the store is gone."""

    def __init__(self, store: dist.Store, place: Address, world_size: int) -> None:
        self._store = store
        self._place = place
        self._world_size = world_size

    def coordinate(self, options: Mapping[str, str], wait: timedelta) -> None:
        """Called on rank 0. Raises ConfigError when a rank has other options, DeadlineExceeded when one is missing."""
        self._store.set(_OPTIONS, json.dumps(dict(options)))
        end = time.monotonic() + wait.total_seconds()
        while absent := self._absent():
            if self._store.check([_REFUSED]):
                raise self._told(ConfigError(self._store.get(_REFUSED).decode()))
            if time.monotonic() > end:
                raise self._told(
                    DeadlineExceeded(
                        f"ranks {absent} are not at {self._place} after {wait.total_seconds():.0f} s: start `headrace "
                        "up trainer` on each machine with its own --node-rank, and see their logs"
                    )
                )
            time.sleep(_ASK_AGAIN_SECONDS)
        self._store.set(_OVER, "")

    def join(self, rank: int, options: Mapping[str, str]) -> None:
        """Called on the others. Raises as rank 0 does, and ConfigError where another process has this one's number."""
        self._compare(rank, options)
        mine, is_late = uuid.uuid4().hex, self._store.check([_OVER])
        if not is_late:
            self._store.set(_here(rank), mine)
        if verdict := self._store.get(_OVER).decode():
            name, _, message = verdict.partition(" ")
            raise _VERDICTS[name](message)
        if is_late:
            raise Unavailable(
                f"the ranks at {self._place} have met without this rank {rank}: it waits for their next start. Where "
                "another machine has its number, give each its own --node-rank"
            )
        if self._store.get(_here(rank)).decode() != mine:
            raise ConfigError(
                f"another process came to {self._place} as rank {rank}: give each machine its own --node-rank",
                field="node_rank",
            )

    def _absent(self) -> list[int]:
        others = range(1, self._world_size)
        if not others or self._store.check([_here(rank) for rank in others]):
            return []
        return [rank for rank in others if not self._store.check([_here(rank)])]

    def _told(self, error: HeadraceError) -> HeadraceError:
        """Returns the error once the others had time to read it: the store ends with this process."""
        self._store.set(_OVER, f"{type(error).__name__} {error.message}")
        time.sleep(_LAST_WORDS_SECONDS)
        return error

    def _compare(self, rank: int, options: Mapping[str, str]) -> None:
        theirs = json.loads(self._store.get(_OPTIONS))
        if different := list(_differences(theirs, options)):
            more = f", and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
            refusal = (
                f"rank {rank} was started with other options than rank 0 at {self._place}: "
                f"{', '.join(different[:_MOST_NAMED])}{more}: give all machines the same job"
            )
            self._store.set(_REFUSED, refusal)
            raise ConfigError(refusal)


def _differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            yield f"{name} {mine.get(name, 'absent')} in place of {theirs.get(name, 'absent')}"


def _here(rank: int) -> str:
    return f"headrace-rank-{rank}"
