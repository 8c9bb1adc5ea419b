"""Reads a stream from a buffer: its history to a position, its groups, its counts. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import DataLoss, DeadlineExceeded, NotFound, OutOfRange, Unavailable
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.replay import Replay

_PAGE = 1_000
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class AuditedLedger:
    """The state of one buffer: one shard of a ledger, or all of it."""

    replay: Replay
    position: int
    """The position up to which the history was read."""
    groups: Mapping[str, pb.Group]
    stats: pb.StreamStats | None
    """None where the ledger has moved since `position`."""


async def read_ledger(buffer: BufferClient, stream: str, silence_seconds: float) -> AuditedLedger:
    """Raises OutOfRange when the history's beginning is deleted, Unavailable when the buffer is silent for so long."""
    try:
        config = await _config(buffer, stream)
        end = await buffer.position()
        replay = await _replay(buffer, config, end, silence_seconds)
        groups = await _groups(buffer, replay)
        await _pass_over_forgotten(buffer, replay, groups, end, silence_seconds)
        stats = await buffer.stats(stream)
        return AuditedLedger(replay, end, groups, stats if await buffer.position() == end else None)
    except (TimeoutError, DeadlineExceeded, Unavailable) as error:
        why = f": {error.message}" if isinstance(error, Unavailable) else ""
        raise Unavailable(
            f"the buffer at {buffer.address} does not answer within {silence_seconds:g} s{why}; see whether it runs "
            "(headrace status), or give it more time with --timeout-seconds"
        ) from error


async def damage_findings(buffer: BufferClient, stream: str) -> list[Finding]:
    """What the buffer has found damaged on its disk, unless it belongs to another stream."""
    own = [one for one in await buffer.damage() if not one.group_id or one.group_id.rpartition("/")[0] == stream]
    return [Finding("damage", f"{one.what}{_whose(one)}") for one in own]


def _whose(damage: pb.Damage) -> str:
    parts = [("group", damage.group_id), ("sample", damage.sample_id)]
    named = ", ".join(f"{kind} {name}" for kind, name in parts if name)
    return f" ({named})" if named else ""


async def _config(buffer: BufferClient, stream: str) -> pb.StreamConfig:
    configs = {config.name: config for config in await buffer.list_streams()}
    if stream not in configs:
        raise NotFound(f"there is no stream {stream!r} to audit; there are {sorted(configs)}")
    return configs[stream]


async def _replay(buffer: BufferClient, config: pb.StreamConfig, end: int, silence_seconds: float) -> Replay:
    replay, position = Replay(config), 0
    async for event in _events(buffer, end, silence_seconds, replay):
        if event.position != position + 1:
            missing = f"{position + 1} to {event.position - 1}"
            replay.findings.append(Finding("history", f"has no events at the positions {missing}"))
        position = event.position
        if event.stream == config.name:
            replay.add(event)
            if event.kind == "stream_deleted":  # one of this name that comes later goes on with its epochs
                replay = Replay(config, findings=replay.findings)
                replay.steps.epoch = event.epoch
    if position < end:
        replay.findings.append(Finding("history", f"has no events at the positions {position + 1} to {end}"))
    replay.finish()
    return replay


async def _events(
    buffer: BufferClient, end: int, silence_seconds: float, replay: Replay, following: int = 1
) -> AsyncIterator[pb.LedgerEvent]:
    """Yields all streams' events up to a position. After an interruption it watches again, behind damaged events."""
    while following <= end:
        try:
            async with aclosing(_watched(buffer, following, silence_seconds)) as events:
                async for event in events:
                    if event.position > end:
                        return
                    yield event
                    following = event.position + 1
                    if event.position == end:
                        return
        except DataLoss as error:
            replay.findings.append(Finding("history", f"is damaged: {error.message}"))
            following = int(error.metadata.get("next_position", end + 1))
        except OutOfRange as error:
            if "position" not in error.metadata:  # not cut off for being slow: the beginning is deleted
                raise
        except Unavailable:
            await asyncio.sleep(_RETRY_SECONDS)
            await buffer.position()  # raises when it does not come back in time


async def _watched(buffer: BufferClient, first: int, silence_seconds: float) -> AsyncGenerator[pb.LedgerEvent]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(silence_seconds) as silence:
        async for event in buffer.watch("", first):
            silence.reschedule(None)
            yield event
            silence.reschedule(loop.time() + silence_seconds)


async def _groups(buffer: BufferClient, replay: Replay) -> Mapping[str, pb.Group]:
    """A group that changes while pages are read may be on none of them: then it is asked for by name."""
    stream = replay.config.name
    groups = {group.group_id: group async for group in _pages(buffer, stream)}
    missing = [group_id for group_id in replay.groups if group_id not in groups]
    for first in range(0, len(missing), _PAGE):
        found = await buffer.list_groups(stream, group_ids=missing[first : first + _PAGE])
        groups.update((group.group_id, group) for group in found.groups)
    return groups


async def _pass_over_forgotten(
    buffer: BufferClient, replay: Replay, groups: Mapping[str, pb.Group], end: int, silence_seconds: float
) -> None:
    """A step that was committed since the history was read may have made the ledger forget groups of old ones."""
    missing = [group_id for group_id, story in replay.groups.items() if not (story.is_forgotten or group_id in groups)]
    if not missing:
        return
    now = await buffer.position()
    async for event in _events(buffer, now, silence_seconds, replay, end + 1):
        if event.stream == replay.config.name and event.kind == "forgotten":
            replay.forget_since(event, missing)


async def _pages(buffer: BufferClient, stream: str) -> AsyncIterator[pb.Group]:
    token = ""
    while True:
        page = await buffer.list_groups(stream, page_size=_PAGE, page_token=token)
        for group in page.groups:
            yield group
        token = page.next_page_token
        if not token:
            return
