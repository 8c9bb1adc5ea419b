"""Prompts come into the ledger when producers ask for work, and with them groups that a data source brings finished.

A data source that wants to see what was generated is given every group once its put is durable. What it chooses of that
to be trained once more takes the places that producers would have had, and is told apart by its prompts' ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.hooks.data_source.generated import Generated, WantedAgain
from headrace.rpc.log import log
from services.buffer.blocking import BlockingPool
from services.buffer.conversion import wire
from services.buffer.conversion.finished import FinishedGroup
from services.buffer.ledger.commands.producing import NoLeaseReason
from services.buffer.ledger.commands.prompting import Finish
from services.buffer.ledger.commands.work import NewSample
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.ledger import Ledger, Result
from services.buffer.ledger.transaction import Transaction
from services.buffer.pace import paced
from services.buffer.prompts.data_source import is_again, origin_group
from services.buffer.prompts.mix import finished_of
from services.buffer.runtime.clock import now
from services.buffer.runtime.prompt_sources import PromptSources
from services.buffer.store.base import Store

CheckSamples = Callable[[Sequence[tuple[str, NewSample]]], Awaitable[None]]
"""Raises InvalidArgument for samples, each with its group's id, that could not be trained."""

_FULL = (NoLeaseReason.ADMISSION, NoLeaseReason.LIMITER, NoLeaseReason.BYTES)


class PromptReading:
    """Reads under the stream's lock. Unblocked by: a lease's request."""

    def __init__(self, ledger: Ledger, sources: PromptSources, store: Store, check: CheckSamples) -> None:
        self._ledger = ledger
        self._sources = sources
        self._store = store
        self._check = check
        self._payloads = BlockingPool("generated-samples", 1)

    async def read(self, stream: str, max_groups: int, note: Callable[[Result[None]], None]) -> None:
        """Reads until no prompt is wanted: while a file is read, other calls may change which source comes next."""
        async with self._sources.locks[stream]:
            if self._sources.chooses(stream) and any(counts := self._wanted(stream, max_groups)):
                await self._choose(stream, sum(counts), note)
            while any(counts := self._wanted(stream, max_groups)):
                reading = await self._sources.read(self._ledger.stream(stream).state, counts)
                finished = await self._finished(stream, reading.finished)
                note(self._ledger.read(now(), stream, reading.prompts, reading.cursors, reading.ended, finished))

    def _wanted(self, stream: str, max_groups: int) -> Sequence[int]:
        """A group that may be chosen again is trained a step late: producers begin that much less ahead."""
        return self._ledger.prompts_wanted(stream, max_groups, is_held_back=self._sources.chooses(stream))

    async def generated(self, transaction: Transaction) -> None:
        """Gives the groups that a durable transaction made READY to the data sources of their streams."""
        ready: defaultdict[str, list[Group]] = defaultdict(list)
        for event in transaction.events:
            if event.kind == "put" and event.group_id and self._sources.takes_samples(event.stream):
                group = transaction.groups[event.group_id]
                if group.state is GroupState.READY and not is_again(group.prompt):
                    ready[event.stream].append(group)
        for stream, groups in ready.items():
            packed = [each async for each in self._packed(groups)]
            known = self._ledger.streams.get(stream)
            if known and groups[0].group_id in known.groups:  # else its stream was deleted since
                await self._sources.hand_over(self._ledger.stream(stream).state, packed, partial(self._kept, stream))

    async def _choose(self, stream: str, count: int, note: Callable[[Result[None]], None]) -> None:
        if self._ledger.no_lease_reason(stream) in _FULL:
            return
        step, oldest = self._ledger.stream(stream).next_filled()
        state = self._ledger.stream(stream).state
        asked = WantedAgain(step, oldest, count, state.config.n_samples_per_prompt, self._of_step(stream, step))
        steps = await self._sources.choose(state, asked, partial(self._kept, stream))
        known = self._ledger.stream(stream).prompts
        new = [each for each in steps if each.prompt.prompt_id not in known]
        if not new:
            return
        finished = await self._finished(stream, finished_of(new))
        ended = state.ended or (state.exhausted,)
        note(self._ledger.read(now(), stream, [[each.prompt for each in new]], state.cursors, ended, finished))
        log.info("groups_trained_again", stream=stream, groups=len(new), step=step)

    async def _finished(self, stream: str, packed: Mapping[str, Sequence[bytes]]) -> dict[str, Finish]:
        """Raises FailedPrecondition for samples that could not be trained."""
        config = self._ledger.stream(stream).state.config
        finished: dict[str, Finish] = {}
        try:
            async for prompt_id, samples in paced(list(packed.items())):
                group = FinishedGroup.parse(
                    samples, config.n_samples_per_prompt, prompt_id, needs_reward=config.needs_reward
                )
                trial = f"{stream}/0"
                await self._check([(trial, sample) for sample in group.named(trial, f"{trial}#1")])
                finished[prompt_id] = group.named
        except InvalidArgument as error:
            raise FailedPrecondition(
                f"the data source brought samples that cannot be trained: {error.message}", reason="DATA_SOURCE_FAILED"
            ) from error
        return finished

    def _of_step(self, stream: str, step: int) -> list[str]:
        """READY groups whose turn is not before the step: chosen for it, they could be twice in one batch."""
        indexed = self._ledger.stream(stream)
        states = (GroupState.READY, GroupState.LEASED)
        waiting = sorted(indexed.change_order.before(self._ledger.position + 1, states), key=lambda g: g.admitted_at)
        before = (step - indexed.state.step) * indexed.state.config.groups_per_step
        return [group.group_id for group in waiting[before:]]

    async def _kept(self, stream: str) -> list[Generated]:
        """The generated groups that still have their samples, and were not chosen since."""
        indexed = self._ledger.stream(stream)
        chosen = {origin_group(prompt_id) for prompt_id in indexed.prompts}
        groups = [
            group
            for group in indexed.groups.values()
            if group.state in (GroupState.READY, GroupState.CONSUMED)
            and not is_again(group.prompt)
            and group.group_id not in chosen
        ]
        return [each async for each in self._packed(groups)]

    async def _packed(self, groups: Sequence[Group]) -> AsyncIterator[Generated]:
        async for group in paced(groups):
            if any(record.column_bytes for record in group.samples):
                log.warning("group_not_handed_over", group_id=group.group_id, why="it has columns that are out of line")
                continue
            payloads = await self._payloads.run(self._store.read_payloads, group.samples)
            pairs = zip(group.samples, payloads, strict=True)
            packed = [wire.sample_to_proto(record, payload).SerializeToString() for record, payload in pairs]
            yield Generated(group.group_id, group.prompt.body, packed)
