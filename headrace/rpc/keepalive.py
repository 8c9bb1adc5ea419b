"""How long a connection may be silent before the other side is asked whether it is there, and how long it may think.

A peer that vanished (its cable was cut, its machine lost power) sends no FIN: only silence tells. Both sides ask, also
while no call is open, so a call without an end, as a watch, hears of it too.
"""

from __future__ import annotations

from collections.abc import Sequence

ASK_SECONDS = 30.0
ANSWER_SECONDS = 10.0
"""Also for data that is on its way: where nothing of it is acknowledged for so long, the connection is over."""

CONNECT_SECONDS = 5.0
"""A connection that is not up by then is begun again: five round trips of a far line, and a lost packet or two."""

_LEAST_BETWEEN_ASKS_SECONDS = 5.0
"""A peer that asks more often is hung up on."""


def keepalive_options() -> Sequence[tuple[str, int]]:
    """What both sides of a gRPC connection have in common."""
    return [
        ("grpc.keepalive_time_ms", _ms(ASK_SECONDS)),
        ("grpc.keepalive_timeout_ms", _ms(ANSWER_SECONDS)),
        ("grpc.http2.ping_timeout_ms", _ms(ANSWER_SECONDS)),  # a minute otherwise, where the kernel still answers
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # gRPC would ask twice, and then once a minute
    ]


def patience_options() -> Sequence[tuple[str, int]]:
    """What a server lets a client ask."""
    return [("grpc.http2.min_ping_interval_without_data_ms", _ms(min(_LEAST_BETWEEN_ASKS_SECONDS, ASK_SECONDS)))]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
