"""Buffer filters: a user's function that chooses which of the waiting groups become the next batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import to_hook
from headrace.hooks.load import Hook, load_hook
from headrace.hooks.sample import Sample
from headrace.hooks.signature import Signature, wrong_signature
from headrace.trajectory import Sample as WireSample

ACCEPTED = (
    "def f(args, buffer, num_samples) -> list[list[Sample]]",
    "def f(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
)


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

    `groups` are serialized samples; the function sees them as `buffer`, a list of groups that it may take out of.
    """
    hook = _filter(path)
    buffer = [
        [to_hook(WireSample.unpack(sample_pb2.Sample.FromString(packed)), place) for packed in group]
        for place, group in enumerate(groups)
    ]
    places = {id(group): place for place, group in enumerate(buffer)}
    kept_alive = list(buffer)  # an id stays its object's own while the object lives
    first = (args, step) if len(Signature.of(hook.target).required) == 4 else (args,)
    chosen = hook.target(*first, buffer, num_groups)
    if inspect.isawaitable(chosen):
        chosen = await chosen
    if not isinstance(chosen, list) or len(chosen) > num_groups:
        found = f"{len(chosen)} groups" if isinstance(chosen, list) else type(chosen).__name__
        raise InvalidArgument(f"hook {path} returned {found}; it must return a list of at most {num_groups} groups")
    taken = [_place(path, group, places, kept_alive) for group in chosen]
    if len(set(taken)) < len(taken):
        raise InvalidArgument(f"hook {path} returned the same group twice")
    left = {id(group) for group in buffer} | {id(kept_alive[place]) for place in taken}
    return taken, [place for place, group in enumerate(kept_alive) if id(group) not in left]


def _place(path: str, group: object, places: dict[int, int], groups: Sequence[list[Sample]]) -> int:
    if id(group) in places:
        return places[id(group)]
    # A copy of the list is as good: its samples know where they come from.
    if isinstance(group, list) and group and isinstance(group[0], Sample) and group[0].group_index is not None:
        place = group[0].group_index
        if 0 <= place < len(groups):
            return place
    raise InvalidArgument(f"hook {path} returned something that is no group of the buffer: {group!r:.80}")


def _filter(path: str) -> Hook:
    hook = load_hook(path)
    signature = Signature.of(hook.target)
    if len(signature.required) not in (3, 4) or signature.required_keywords or inspect.isclass(hook.target):
        raise wrong_signature(hook.path, hook.target, ACCEPTED)
    return hook
