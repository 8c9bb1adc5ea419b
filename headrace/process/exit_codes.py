"""Exit codes by which a service tells its supervisor whether another start may help. All others mean: it may."""

from __future__ import annotations

NOT_WORTH_RESTARTING = 2
"""There is a mistake in its job or command line."""

NOTHING_TO_LEARN = 3
"""Too many samples failed. The last lines of its log that begin with its name, and those indented below, say why."""

PEER_AWAY = 75
"""Another service, or the database, did not answer for as long as this one waits (sysexits.h: EX_TEMPFAIL)."""


PEER_LOST = 75
"""Exit code of a rank that ended because another one is gone: not the one to blame."""
