"""The times after which a silent connection is asked whether its other side is there, and given up without an answer.

A peer that vanished (its cable was cut, its machine lost power) sends no FIN: only silence tells. Both sides ask, also
while no call is open, so a call without an end, as a watch, hears of it too.
"""

from __future__ import annotations

from collections.abc import Sequence

ASK_SECONDS = 30.0
ACKNOWLEDGED_SECONDS = 10.0
"""A connection ends when the other side's kernel has acknowledged nothing for this long."""

ANSWER_SECONDS = 20.0
"""The same where the kernel acknowledges but no answer comes. Answers queue behind data, for seconds on a slow line."""

CONNECT_SECONDS = 5.0
"""A connection that is not up by then is begun again: five round trips of a far line, and a lost packet or two."""


def keepalive_options() -> Sequence[tuple[str, int]]:
    """The options that both sides of a gRPC connection have in common."""
    return [
        ("grpc.keepalive_time_ms", _ms(ASK_SECONDS)),
        ("grpc.keepalive_timeout_ms", _ms(ACKNOWLEDGED_SECONDS)),
        ("grpc.http2.ping_timeout_ms", _ms(ANSWER_SECONDS)),  # a minute otherwise
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # gRPC would ask twice, and then once a minute
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
