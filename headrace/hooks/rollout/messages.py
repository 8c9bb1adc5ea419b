"""The messages between a rollout function's data source and the service that leases its groups, over a Unix socket.

A group goes by the number of its lease in the service, as one group of the ledger may be leased again meanwhile.
A message is its length and MessagePack. The data source asks one thing at a time and gets one reply. User code shares
the process with it and may write anything: bytes that are none of these messages end the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from headrace.hooks.sample import Sample
from headrace.process.worker_main import encode

HEADER = struct.Struct("<Q")


class LeasedGroup(msgspec.Struct):
    """A prompt's samples, to be generated or continued."""

    lease_number: int
    samples: list[Sample]


class MadeGroup(msgspec.Struct):
    """A group's samples by their places; a place has several where one execution fanned out, and none if it lacks."""

    lease_number: int
    samples: list[list[Sample]]


class GetSamples(msgspec.Struct, tag=True):
    """Wants `count` groups."""

    count: int


class AddSamples(msgspec.Struct, tag=True):
    """Gives a group back unfinished, with the tokens that it has."""

    group: MadeGroup


class DropSamples(msgspec.Struct, tag=True):
    """Gives a group up: another prompt takes its place in the batch."""

    lease_number: int
    reason: str
    rewards: list[float]


class ReturnSamples(msgspec.Struct, tag=True):
    """The function has returned a group."""

    group: MadeGroup


class FailSamples(msgspec.Struct, tag=True):
    """The function has returned a group that cannot be used."""

    lease_number: int
    why: str


Order = GetSamples | AddSamples | DropSamples | ReturnSamples | FailSamples


class Groups(msgspec.Struct, tag=True):
    """Groups that were leased."""

    groups: list[LeasedGroup]


class OrderDone(msgspec.Struct, tag=True):
    """The order was carried out."""


class OrderRefused(msgspec.Struct, tag=True):
    """It was not, for a reason that the user's function is told."""

    why: str


Reply = Groups | OrderDone | OrderRefused
Ask = Callable[[Order], Reply]
"""Sends an order and waits for its reply."""


def packed(message: Order | Reply) -> bytes:
    body = encode(message)
    return HEADER.pack(len(body)) + body
