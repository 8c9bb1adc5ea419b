"""Which scorer pays, which one is tried, and who paid before: `Swap`, which is pure, and its file.

A scorer is named by a text: a built-in one, a function (file.py:fn), a composition (file.toml), another service
(grpc://HOST:PORT/SCORER), or "" for the job's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from headrace.disk import durable_write
from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument
from headrace.rpc.log import log

_KEPT_FORMER = 32
_KEPT_CHANGES = 256
_BUCKETS = 1 << 32


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """A scorer, and the version that it had when it was loaded last. An empty name: the job's own."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate for a share of the groups, above 0. It `pays` in a canary; nothing trains on a shadow's scores."""

    scorer: NamedScorer
    share: float
    pays: bool

    def takes(self, group_id: str) -> bool:
        """True for the same groups at every call. A larger share takes more groups and loses none."""
        digest = hashlib.sha256(group_id.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:4]) < self.share * _BUCKETS


@dataclass(frozen=True, slots=True)
class Swap:
    """Each method returns the state after a change."""

    job: str
    """What the job says of its scorer: another job starts with another state."""
    live: NamedScorer
    trial: Trial | None = None
    former: tuple[NamedScorer, ...] = ()
    """Who paid before, the latest last."""
    change_ids: tuple[str, ...] = ()
    """The latest changes: one of them is not made again."""
    changes: int = 0

    def set(self, scorer: NamedScorer) -> Swap:
        former = self.former if scorer == self.live else (*self.former, self.live)[-_KEPT_FORMER:]
        return replace(self, live=scorer, trial=None, former=former)

    def tried(self, trial: Trial) -> Swap:
        return replace(self, trial=trial)

    def promoted(self) -> Swap:
        """Raises FailedPrecondition without a candidate."""
        return self.set(self.candidate)

    def rolled_back(self, scorer: NamedScorer) -> Swap:
        return replace(self, live=scorer, trial=None, former=self.former[:-1])

    def stopped(self) -> Swap:
        return replace(self, trial=None)

    @property
    def candidate(self) -> NamedScorer:
        """Raises FailedPrecondition without one."""
        if self.trial is None:
            raise FailedPrecondition(
                "no scorer is tried: name one with `headrace reward shadow SCORER` or `headrace reward canary SCORER`",
                reason="NO_CANDIDATE",
            )
        return self.trial.scorer

    @property
    def before(self) -> NamedScorer:
        """Raises FailedPrecondition where no other scorer has paid before."""
        if not self.former:
            raise FailedPrecondition(
                "no other scorer has paid before this one: name one with `headrace reward set SCORER`",
                reason="NO_FORMER_SCORER",
            )
        return self.former[-1]

    def numbered(self, change_id: str) -> Swap:
        """Counts a change, so that it is not made again."""
        return replace(self, change_ids=(*self.change_ids, change_id)[-_KEPT_CHANGES:], changes=self.changes + 1)


def checked_share(share: float) -> float:
    """Raises InvalidArgument for a share that no group or more than all groups would be in."""
    if not 0 < share <= 1:
        raise InvalidArgument(f"share is {share:g}, must be above 0 and at most 1", field="share")
    return share


_SWAP = TypeAdapter(Swap)


class SwapFile:
    """The state on disk: replaced whole and synced before a change is answered. Without a path it is not kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def read(self, job: str) -> Swap:
        """The state of this job. Raises ConfigError for a file that holds none."""
        new = Swap(job, NamedScorer("", ""))
        if self.path is None or not self.path.is_file():
            return new
        try:
            found = _SWAP.validate_json(self.path.read_bytes())
        except (ValidationError, OSError) as error:
            raise ConfigError(
                f"{self.path} does not say which scorer pays ({type(error).__name__}): delete it, and the job's own "
                "scorer pays"
            ) from error
        if found.job != job:
            log.warning("swap_forgotten", why="the job names another scorer", live=found.live.name, job=job)
            return replace(new, former=found.former, changes=found.changes)
        return found

    def write(self, swap: Swap) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with durable_write(self.path) as draft:
            draft.write_bytes(_SWAP.dump_json(swap, indent=2) + b"\n")
