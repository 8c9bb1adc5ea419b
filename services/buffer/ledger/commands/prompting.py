"""Commands that bring prompts in: submitted ones, and those that were read from a stream's sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from headrace.errors import AlreadyExists, ResourceExhausted
from services.buffer.ledger.commands.producing import check_bytes, complete, grant
from services.buffer.ledger.commands.work import NewSample, Work
from services.buffer.ledger.group import Group, Prompt
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.source import Cursor

Finish = Callable[[str, str], tuple[NewSample, ...]]
"""(group id, lease id) → the samples of a group that came finished; checked before, so that it does not raise."""

_DATA_SOURCE = "data source"


def submit(work: Work, stream: IndexedStream, prompts: Sequence[Prompt]) -> list[str]:
    """Makes one group for each prompt; all of them or none."""
    _add_groups(work, stream, check_submit(stream, prompts))
    return [stream.prompts[prompt.prompt_id] for prompt in prompts]


def check_submit(stream: IndexedStream, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts that are new. Raises unless all of them can be stored."""
    new: dict[str, Prompt] = {}
    for prompt in prompts:
        known = stream.groups[stream.prompts[prompt.prompt_id]].prompt if prompt.prompt_id in stream.prompts else None
        earlier = known or new.setdefault(prompt.prompt_id, prompt)
        if earlier.body != prompt.body:
            raise AlreadyExists(
                f"prompt {prompt.prompt_id} was submitted to {stream.state.name} before with another content: "
                "give it another prompt_id"
            )
    check_room(stream, len(new))
    check_bytes(stream, sum([len(prompt.body) for prompt in new.values()]), stream.stored_bytes)
    return list(new.values())


def check_room(stream: IndexedStream, num_groups: int) -> None:
    """Raises ResourceExhausted when `num_groups` more groups exceed one of the stream's limits."""
    limit = stream.state.config.max_queued_groups
    if stream.queues.num_queued + num_groups > limit:
        raise ResourceExhausted(
            f"stream {stream.state.name} has {stream.queues.num_queued} groups queued, {num_groups} more exceed "
            f"max_queued_groups {limit}: submit again when producers have taken some",
            retry_after_seconds=1.0,
        )
    room = stream.state.config.max_groups - stream.num_groups
    if num_groups > room:
        raise ResourceExhausted(
            f"stream {stream.state.name} holds {stream.num_groups} groups, {num_groups} more exceed max_groups "
            f"{stream.state.config.max_groups}: submit again when some were committed",
            retry_after_seconds=1.0,
        )


def read(
    work: Work,
    stream: IndexedStream,
    prompts: Sequence[Sequence[Prompt]],
    cursors: Sequence[Cursor],
    ended: Sequence[bool],
    finished: Mapping[str, Finish],
    ledger_id: str,
) -> None:
    """Makes groups of the prompts read from each source, and moves the cursors with them.

    `finished` has those that are READY at once, by prompt id.
    """
    for prompt in chain.from_iterable(prompts):
        if prompt.prompt_id in stream.prompts:
            raise AlreadyExists(
                f"prompt {prompt.prompt_id} of {stream.state.name}'s source was submitted before: "
                "submitted prompts need ids of their own"
            )
    for source, those in enumerate(prompts):
        _add_groups(work, stream, those, source)
    state = replace(stream.state, cursors=tuple(cursors), ended=tuple(ended), exhausted=all(ended))
    work.set_state(stream, state)
    for prompt_id, finish in finished.items():
        _finish(work, stream, stream.groups[stream.prompts[prompt_id]], finish, ledger_id)


def _finish(work: Work, stream: IndexedStream, group: Group, finish: Finish, ledger_id: str) -> None:
    """Finishes the group as if a producer had leased and put it."""
    stream.queues.discard_queued(group)
    leased = grant(work, stream, group, _DATA_SOURCE, "", ledger_id)
    samples = finish(group.group_id, leased.live_lease.lease_id)
    complete(work, stream, work.end_lease(leased), samples, leased.live_lease.policy_version)


def _add_groups(work: Work, stream: IndexedStream, prompts: Sequence[Prompt], source: int | None = None) -> None:
    if not prompts:
        return
    seq = stream.state.next_seq
    work.set_state(stream, replace(stream.state, next_seq=seq + len(prompts)))
    config = stream.state.config
    for i, prompt in enumerate(prompts, seq):
        number = i * config.num_shards + config.shard
        work.add(stream, Group(f"{config.name}/{number}", config.name, i, prompt, source=source))
