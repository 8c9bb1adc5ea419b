"""The trainer's side of shared devices, against ranks and engines that write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from headrace.client.rollout import RolloutClient
from headrace.errors import Unavailable
from services.trainer.gpu_sharing import SharedDevices, clear


class BothSides:
    """Ranks and engines in one diary. The first call of each in `fails` raises, after it was done."""

    def __init__(self, *fails: str) -> None:
        self.diary: list[str] = []
        self._fails = set(fails)

    async def to_host(self) -> None:
        self._note("to host")

    async def to_device(self) -> None:
        self._note("to device")

    async def release_memory(self, epoch: int = 0, *, deadline_seconds: float) -> Sequence[str]:
        self._note(f"release {epoch}")
        return ["engine-0"]

    async def resume_memory(self, epoch: int, *, deadline_seconds: float) -> Sequence[str]:
        self._note(f"resume {epoch}")
        return ["engine-0"]

    def _note(self, what: str) -> None:
        self.diary.append(what)
        if what in self._fails:
            self._fails.discard(what)
            raise Unavailable(f"{what} was not answered")

    def devices(self, *, keeps_engines: bool = False, offloads: bool = True) -> SharedDevices:
        engines = () if keeps_engines else [cast(RolloutClient, self)]
        to_host, to_device = (self.to_host, self.to_device) if offloads else (None, None)
        devices = SharedDevices(engines, seconds=1.0, to_host=to_host, to_device=to_device)
        devices.claim(7)
        return devices


async def test_ranks_leave_before_engines_come_and_come_when_engines_have_left() -> None:
    it = BothSides()
    devices = it.devices()
    await clear([cast(RolloutClient, it)], seconds=1.0)
    await devices.take()
    for _ in range(2):
        await devices.give()
    for _ in range(2):
        await devices.take()
    assert it.diary == ["release 0", "to host", "resume 7", "release 7", "to device"]


@pytest.mark.parametrize("point", ["to host", "resume 7", "release 7", "to device"])
async def test_what_fails_in_the_middle_is_done_again_and_never_leaves_both_there(point: str) -> None:
    it = BothSides(point)
    devices = it.devices()

    async def there_and_back() -> None:
        await devices.give()
        await devices.take()

    with pytest.raises(Unavailable):
        await there_and_back()
    await devices.take()
    await devices.give()
    ranks_are_there, engines_may_be = True, False
    for what in it.diary:
        match what.split()[0], what:
            case "resume", _:
                assert not ranks_are_there
                engines_may_be = True
            case "release", _:
                engines_may_be = False
            case _, "to device":
                assert not engines_may_be
                ranks_are_there = True
            case _:
                ranks_are_there = False
    assert it.diary[-2:] == ["to host", "resume 7"]


async def test_without_offload_train_or_offload_rollout_that_side_keeps_its_memory() -> None:
    for offload_train, offload_rollout, expected in (
        (False, True, ["resume 7", "release 7"]),
        (True, False, ["to host", "to device"]),
        (False, False, []),
    ):
        it = BothSides()
        devices = it.devices(keeps_engines=not offload_rollout, offloads=offload_train)
        await devices.give()
        await devices.take()
        assert it.diary == expected
