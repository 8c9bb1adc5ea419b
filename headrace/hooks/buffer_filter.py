"""Buffer filters: a user's function that chooses which of the waiting groups become the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import to_hook
from headrace.hooks.load import Hook, Signature, awaited, load_function
from headrace.hooks.sample import Sample
from headrace.trajectory import Sample as WireSample

ACCEPTED = (
    "def f(args, buffer, num_samples) -> list[Sample]",
    "def f(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
)

_WHAT = {True: "groups", False: "samples"}


def load_buffer_filter(path: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    _filter(path)


def pack_groups(file: Path, groups: Iterable[Sequence[bytes]]) -> None:
    """Writes groups of serialized samples: all that wait may be more than a message between processes should hold."""
    with file.open("wb") as out:
        for group in groups:
            data = msgspec.msgpack.encode(group)
            out.write(len(data).to_bytes(8, "little"))
            out.write(data)


def _unpacked(file: Path) -> Iterator[Sequence[bytes]]:
    with file.open("rb") as packed:
        while length := packed.read(8):
            yield msgspec.msgpack.decode(packed.read(int.from_bytes(length, "little")), type=list[bytes])


async def run_packed_buffer_filter(
    path: str, args: HookArgs, step: int, file: Path, num_groups: int
) -> tuple[list[int], list[int]]:
    """`run_buffer_filter` of the groups in a file that `pack_groups` has written."""
    return await run_buffer_filter(path, args, step, list(_unpacked(file)), num_groups)


async def run_buffer_filter(
    path: str, args: HookArgs, step: int, groups: Sequence[Sequence[bytes]], num_groups: int
) -> tuple[list[int], list[int]]:
    """(chosen, taken out and not chosen), as places in `groups`. Runs in a worker. Raises InvalidArgument for others.

    `groups` are serialized samples. The function sees them as `buffer`, which it may take out of: with `rollout_id` a
    list of groups of which it chooses, without a flat list of their samples. A group is chosen whole, in the place of
    the first of its samples that is.
    """
    hook = _filter(path)
    takes_groups = len(Signature.of(hook.target).required) == 4
    known = [
        [to_hook(WireSample.unpack(sample_pb2.Sample.FromString(packed)), place) for packed in group]
        for place, group in enumerate(groups)
    ]
    buffer: list[Any] = list(known) if takes_groups else [sample for group in known for sample in group]
    most = num_groups if takes_groups else num_groups * min(map(len, known), default=1)
    chosen = await awaited(hook.target(*((args, step) if takes_groups else (args,)), buffer, most))
    if not isinstance(chosen, list) or len(chosen) > most:
        found = f"{len(chosen)} {_WHAT[takes_groups]}" if isinstance(chosen, list) else type(chosen).__name__
        raise InvalidArgument(
            f"hook {path} returned {found}; it must return a list of at most {most} {_WHAT[takes_groups]}"
        )
    places = [_place(path, each, len(known)) for each in chosen]
    taken = list(dict.fromkeys(places))[:num_groups]
    if takes_groups and len(set(places)) < len(places):
        raise InvalidArgument(f"hook {path} returned the same group twice")
    left = {_place(path, each, len(known)) for each in buffer}
    return taken, [place for place in range(len(known)) if place not in left and place not in places]


def _place(path: str, each: object, num_groups: int) -> int:
    """A sample's own group: each knows its own, in copies too."""
    sample = each[0] if isinstance(each, list) and each else each
    if isinstance(sample, Sample) and sample.group_index is not None and 0 <= sample.group_index < num_groups:
        return sample.group_index
    raise InvalidArgument(f"hook {path} returned something that is no part of the buffer: {each!r:.80}")


def _filter(path: str) -> Hook:
    return load_function(path, ACCEPTED, (3, 4))
