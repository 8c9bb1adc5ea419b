"""What a buffer says of a stream: its history to a position, and the samples it has for every group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.audit.history import History
from headrace.client.buffer import BufferClient

_PAGE = 1_000


async def read_history(buffer: BufferClient, stream: str) -> History:
    """Everything up to the position at which the ledger is now. Raises OutOfRange when its beginning is deleted."""
    history, end = History(), await buffer.position()
    if end == 0:
        return history
    async for event in buffer.watch("", 1):
        if event.stream == stream:
            history.add(event)
        if event.position >= end:
            break
    return history


async def read_kept(buffer: BufferClient, stream: str, history: History) -> Mapping[str, Sequence[str]]:
    """Group → the samples kept for it. Groups that changed after the history was read count as it says."""
    groups = {group.group_id: group async for group in _pages(buffer, stream)}
    moved = [group_id for group_id in history.held if group_id not in groups]
    for some in _portions(moved):
        found = await buffer.list_groups(stream, group_ids=some)
        groups.update((group.group_id, group) for group in found.groups)
    return {group.group_id: _samples(group, history) for group in groups.values()}


def _samples(group: pb.Group, history: History) -> Sequence[str]:
    if group.position > history.position:
        return history.held.get(group.group_id, ())
    return [sample.sample_id for sample in group.samples]


async def _pages(buffer: BufferClient, stream: str) -> AsyncIterator[pb.Group]:
    token = ""
    while True:
        page = await buffer.list_groups(stream, page_size=_PAGE, page_token=token)
        for group in page.groups:
            yield group
        token = page.next_page_token
        if not token:
            return


def _portions(group_ids: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(group_ids)
    while some := list(islice(rest, _PAGE)):
        yield some
