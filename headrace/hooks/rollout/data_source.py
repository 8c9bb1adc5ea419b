"""`data_source`, as a rollout function has it: its groups are leased from the ledger, and end there.

Every sample that the function is given remembers its group and its place in it, in copies too; one that the function
makes itself is known by the `group_index` and `index` that it copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import plain
from headrace.hooks.rollout.messages import (
    AddSamples,
    Ask,
    DropSamples,
    FailSamples,
    GetSamples,
    Groups,
    MadeGroup,
    Order,
    OrderRefused,
    Reply,
    ReturnSamples,
)
from headrace.hooks.sample import Sample

_ORIGIN = "_leased_group_and_place"
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


class LedgerDataSource:
    """The data source of one call. Its methods block; they may be called from several threads."""

    def __init__(self, args: HookArgs, ask: Ask, sendable: Callable[[Sample], Sample] = plain) -> None:
        self._args = args
        self._ask = ask
        self._sendable = sendable
        self._lock = threading.Lock()
        self._held: dict[int, list[Sample]] = {}
        """Groups that were leased for this call and have not ended, by the numbers of their leases."""
        self._by_number: dict[int, int | None] = {}
        """The numbers by `group_index`; None for one that several groups have."""
        self.num_ended = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns `num_samples` groups of --n-samples-per-prompt samples, or fewer when the ledger lets out no more.

        Waits for them. Raises FailedPrecondition when there can be none until some that this call holds have ended.
        """
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise InvalidArgument(f"get_samples({num_samples!r:.40}): ask for at least one group")
        reply = self._asked(GetSamples(num_samples))
        leased = reply.groups if isinstance(reply, Groups) else []
        for group in leased:
            self._remember(group.lease_number, group.samples)
        return [list(group.samples) for group in leased]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Gives groups back: they are leased again later, with --partial-rollout from the tokens that they have."""
        for group in samples:
            made = self.made(group)
            self._asked(AddSamples(made))
            self._end(made.lease_number)

    def drop_samples(self, samples: list[list[Sample]], reason: str = "") -> None:
        """Gives groups up, as a dynamic sampling filter does: the ledger lets out others in their place at once."""
        for group in samples:
            self._drop(self.made(group).lease_number, reason or "the rollout function dropped it")

    def return_group(self, group: Any) -> str | None:
        """Ends a group that the function has returned. Returns why that could not be, or None."""
        try:
            made = self.made(group)
        except InvalidArgument as error:
            for lease_number in self._groups_of(group):
                self._asked(FailSamples(lease_number, error.message))
                self._end(lease_number)
            return error.message
        self._asked(ReturnSamples(made))
        self._end(made.lease_number)
        return None

    def drop_finished(self, returned: Sequence[Any]) -> None:
        """Drops groups that the function has finished and does not return: a filter of its own has left them out."""
        kept = {number for group in returned for number in self._groups_of(group)}
        for lease_number, samples in list(self._held.items()):
            if lease_number not in kept and all(sample.status in _FINISHED for sample in samples):
                self._drop(lease_number, "the rollout function finished it and did not return it")

    def made(self, group: Any) -> MadeGroup:
        """Returns samples of one group by their places. Raises InvalidArgument for anything else."""
        flat = _flat(group)
        leases = {self._origin(sample)[0] for sample in flat}
        lease_number = leases.pop() if len(leases) == 1 else None
        if lease_number is None:
            raise InvalidArgument(
                "a group must hold the samples of one group of data_source.get_samples, and none of it may have ended: "
                "keep each sample's group_index and index in the samples that you make"
            )
        by_place: list[list[Sample]] = [[] for _ in self._held[lease_number]]
        for position, sample in enumerate(flat):
            place = self._origin(sample)[1]
            if place is None and len(flat) == len(by_place):
                place = position
            if place is None or not 0 <= place < len(by_place):
                raise InvalidArgument(f"a sample has index {sample.index!r:.40}, its group has {len(by_place)} samples")
            by_place[place].append(self._sendable(sample))
        return MadeGroup(lease_number, by_place)

    def _drop(self, lease_number: int, reason: str) -> None:
        samples = self._held[lease_number]
        rewards = [value for sample in samples if (value := _reward(self._args, sample)) is not None]
        self._asked(DropSamples(lease_number, reason, rewards))
        self._end(lease_number)

    def _asked(self, order: Order) -> Reply:
        with self._lock:
            reply = self._ask(order)
        if isinstance(reply, OrderRefused):
            raise FailedPrecondition(reply.why)
        return reply

    def _remember(self, lease_number: int, samples: Sequence[Sample]) -> None:
        self._held[lease_number] = list(samples)
        for place, sample in enumerate(samples):
            setattr(sample, _ORIGIN, (lease_number, place))
        number = samples[0].group_index
        if number is not None:
            self._by_number[number] = None if number in self._by_number else lease_number

    def _end(self, lease_number: int) -> None:
        self.num_ended += 1
        self._held.pop(lease_number, None)

    def _origin(self, sample: Sample) -> tuple[int | None, int | None]:
        lease_number, place = getattr(sample, _ORIGIN, (None, None))
        if lease_number is None and sample.group_index is not None:
            lease_number = self._by_number.get(sample.group_index)
            place = sample.index if isinstance(sample.index, int) else None
        return (lease_number, place) if lease_number in self._held else (None, None)

    def _groups_of(self, group: Any) -> set[int]:
        items = group if isinstance(group, list | tuple) else [group]
        flat = [one for item in items for one in (item if isinstance(item, list | tuple) else [item])]
        return {number for one in flat if isinstance(one, Sample) and (number := self._origin(one)[0]) is not None}


def no_data_source(order: Order) -> Reply:
    """The ledger as an evaluation has it."""
    return OrderRefused("an evaluation has no data source: read the files of args.eval_datasets")


def whole_groups(samples: Sequence[Any]) -> list[Any]:
    """Returns groups as they are, and single samples as groups of those that have one group_index."""
    groups: dict[object, list[Sample]] = {}
    for position, each in enumerate(samples):
        if isinstance(each, Sample):
            origin = getattr(each, _ORIGIN, (None, None))[0] or each.group_index
            groups.setdefault((origin,) if origin is not None else position, []).append(each)
        else:
            groups[position] = each
    return list(groups.values())


def _flat(group: Any) -> list[Sample]:
    items = group if isinstance(group, list | tuple) else [group]
    flat = [one for item in items for one in (item if isinstance(item, list | tuple) else [item])]
    strangers = sorted({type(one).__name__ for one in flat if not isinstance(one, Sample)})
    if strangers or not flat:
        raise InvalidArgument(f"a group holds {strangers or 'nothing'}; it must be a list of Samples")
    return flat


def _reward(args: HookArgs, sample: Sample) -> float | None:
    try:
        return sample.get_reward_value(args)
    except (InvalidArgument, TypeError, ValueError):
        return None
