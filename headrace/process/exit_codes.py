"""Exit codes of services: they tell the supervisor whether another start may help.

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

from pydantic import ValidationError

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


def exit_code(error: Exception, peers_errors: tuple[type[HeadraceError], ...] = ()) -> int:
    """The code of what ended a service; `peers_errors` are those that mean a peer is away."""
    if isinstance(error, NothingToLearn):
        return NOTHING_TO_LEARN
    if isinstance(error, ConfigError | ValidationError):
        return NOT_WORTH_RESTARTING
    return PEER_AWAY if isinstance(error, peers_errors) else FAILED
