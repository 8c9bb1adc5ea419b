"""How services end: their exit codes, what the trainer leaves to say why, and the signals that ask ranks to end.

| code | ends with it | another start |
|---|---|---|
| 0 | a service that was asked to end; a trainer whose run is finished | |
| 1 | any other error: its own engines, router, disk or port | may help, and counts |
| 2 | a mistake in its job or command line | cannot help |
| 3 | a trainer whose samples fail | cannot help before somebody corrects that |
| 75 | a trainer whose buffer or rollout service is away, a buffer whose database is | may help, and does not count |
| 76 | a trainer's rank that another rank has left | counts as the other rank's end |

The rollout service waits for a buffer that is away for as long as it takes, because engines take minutes to start. It
asks a reward service for five minutes and then puts the samples as FAILED. The reward service needs nobody.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from headrace.disk import atomic_write
from headrace.errors import ConfigError, HeadraceError, NothingToLearn

FAILED = 1

NOT_WORTH_RESTARTING = 2
"""There is a mistake in its job or command line."""

NOTHING_TO_LEARN = 3
"""Too many samples failed. The last lines of its log that begin with its name, and those indented below, say why."""

PEER_AWAY = 75
"""Another service, or the database, did not answer for as long as this one waits (sysexits.h: EX_TEMPFAIL)."""

PEER_LOST = 76
"""Another rank is gone: this one is not to blame."""

INTERRUPTED = 130
"""A launcher's: a signal ended it before the run was finished, so that nobody takes the run for finished."""

SRUN_PASSES_ON = signal.SIGUSR1
"""srun passes it on to its tasks. A SIGTERM it takes for itself, and kills them."""

ASK_TO_END = (signal.SIGTERM, SRUN_PASSES_ON)
"""The signals by which ranks are asked to end in order."""

_OF_PEERS = {PEER_AWAY: " (a service that it needs does not answer)", PEER_LOST: " (other ranks are gone)"}
_KILLED = 128 + signal.SIGKILL
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """A trainer's bad end, in its run's folder: srun keeps neither exit code nor message.

    Rank 0 writes it last of all; the next start of the trainer removes it. `exit_code` is rank 0's own; `message` is
    for a person.
    """

    exit_code: int
    message: str

    def write(self, file: Path) -> None:
        with atomic_write(file) as draft:
            draft.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> ExitStatus | None:
        """None when no trainer has ended with an error, or when the file is damaged."""
        try:
            tree = json.loads(file.read_text(errors="replace"))
            return cls(int(tree["exit_code"]), str(tree["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def exit_code(error: Exception, peers_errors: tuple[type[HeadraceError], ...] = ()) -> int:
    """The code of what ended a service; `peers_errors` are those that mean a peer is away."""
    if isinstance(error, NothingToLearn):
        return NOTHING_TO_LEARN
    if isinstance(error, ConfigError | ValidationError):
        return NOT_WORTH_RESTARTING
    return PEER_AWAY if isinstance(error, peers_errors) else FAILED


def of_shell(code: int) -> int:
    """Python's exit code as a shell tells it: 128 + n when signal n ended the process."""
    return 128 - code if code < 0 else code


def meaning(code: int, resident_bytes: int | None = None) -> str:
    """Describes an exit code, where 128 + n is signal n, to a person.

    The kernel ends a process with SIGKILL when memory runs out, and tells nobody else: `resident_bytes`, what the
    process had before it, stands beside the signal.
    """
    if code <= 128:
        return f"exit code {code}{_OF_PEERS.get(code, '')}"
    if code != _KILLED:
        return f"signal {code - 128}"
    had = "" if resident_bytes is None else f" It had {_in_words(resident_bytes)} resident"
    return f"signal 9 (killed: out of memory?{had})"


def _in_words(num_bytes: float) -> str:
    """The bytes in the unit in which they have one to four digits."""
    unit = 0
    while num_bytes >= 1024 and unit + 1 < len(_UNITS):
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
