"""Answers are limited in bytes: lists are cut into as many messages as they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from headrace.limits import MAX_ANSWER_BYTES
from services.buffer.ledger.group import SampleRecord

_Item = TypeVar("_Item")
_MOST_ITEMS = 2_048


def sample_chunks(records: Iterable[SampleRecord]) -> Iterator[list[SampleRecord]]:
    """Cuts samples into messages by their payloads' sizes. A sample larger than a message should be is alone in one."""
    return cut(records, lambda record: record.payload_bytes + len(record.envelope))


def cut(items: Iterable[_Item], size: Callable[[_Item], int], most: int = MAX_ANSWER_BYTES) -> Iterator[list[_Item]]:
    """Cuts the items into chunks that fit one answer each."""
    some: list[_Item] = []
    num_bytes = 0
    for item in items:
        item_bytes = size(item)
        if some and (num_bytes + item_bytes > most or len(some) == _MOST_ITEMS):
            yield some
            some, num_bytes = [], 0
        some.append(item)
        num_bytes += item_bytes
    if some:
        yield some


def first_within(items: Iterable[_Item], size: Callable[[_Item], int], most: int = MAX_ANSWER_BYTES) -> list[_Item]:
    """Returns the first items, as many as fit one answer."""
    return next(cut(items, size, most), [])
