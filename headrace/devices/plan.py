"""Gives each GPU to at most one process: first the trainer's ranks, then the engines, or both to the same ones.

The trainer takes as many devices on each of the first machines, engines what is left. Devices of one NUMA node are
taken together, and an engine lies in one node wherever a node has room for it. Pure: it knows no device but by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.devices.host import Device, Host, named
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job's demand for devices. `engine_sizes` are GPUs of each engine, in the engines' order."""

    trainer_machines: int
    ranks_per_machine: int
    engine_sizes: Sequence[int]
    colocate: bool = False


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Devices of one machine that one rank group or one engine has to itself."""

    machine: str
    devices: Sequence[Device]

    @property
    def visible(self) -> str:
        """Returns the value of CUDA_VISIBLE_DEVICES."""
        return ",".join(device.name for device in self.devices)

    def __str__(self) -> str:
        return named(self.devices)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The trainer has a share of each of its machines; each engine has one share."""

    trainer: Sequence[DeviceShare]
    engines: Sequence[DeviceShare]

    def engines_on(self, machine: str) -> Sequence[DeviceShare]:
        """The shares of the engines of one machine, in the engines' order."""
        return [share for share in self.engines if share.machine == machine]


@dataclass(slots=True)
class _Free:
    """The devices of a machine that nobody has yet, near ones together."""

    name: str
    devices: list[Device] = field(default_factory=list)

    def take(self, count: int) -> DeviceShare:
        """The next `count` devices: of the NUMA node with the fewest left that has enough, else of all nodes."""
        nodes = {device.numa_node for device in self.devices}
        of_node = {node: [device for device in self.devices if device.numa_node == node] for node in nodes}
        roomy = [found for found in of_node.values() if len(found) >= count]
        chosen = min(roomy, key=lambda found: (len(found), self.devices.index(found[0])), default=self.devices)[:count]
        self.devices = [device for device in self.devices if device not in chosen]
        return DeviceShare(self.name, chosen)


def plan_devices(machines: Sequence[Host], wanted: Wanted) -> DevicePlan:
    """Raises ConfigError, with what there is and what is wanted, when the machines have too few devices."""
    free = [_Free(machine.name, machine.nearest_first()) for machine in machines]
    trainer = _of_trainer(free, machines, wanted)
    if wanted.colocate:
        taken = {(share.machine, device.name) for share in trainer for device in share.devices}
        free = [
            _Free(machine.name, [device for device in machine.nearest_first() if (machine.name, device.name) in taken])
            for machine in machines
        ]
    return DevicePlan(trainer, _of_engines(free, machines, wanted))


def _of_trainer(free: Sequence[_Free], machines: Sequence[Host], wanted: Wanted) -> list[DeviceShare]:
    with_room = [machine for machine in free if len(machine.devices) >= wanted.ranks_per_machine]
    if len(with_room) < wanted.trainer_machines:
        raise _too_few(
            machines,
            wanted,
            f"{len(with_room)} of {len(machines)} have {wanted.ranks_per_machine} GPUs for the trainer, and it wants "
            f"{wanted.trainer_machines} such machines",
            "actor_num_gpus_per_node",
        )
    return [machine.take(wanted.ranks_per_machine) for machine in with_room[: wanted.trainer_machines]]


def _of_engines(free: Sequence[_Free], machines: Sequence[Host], wanted: Wanted) -> list[DeviceShare]:
    """Large engines choose first, so that small ones do not leave them scattered devices."""
    shares: dict[int, DeviceShare] = {}
    for number in sorted(range(len(wanted.engine_sizes)), key=lambda number: -wanted.engine_sizes[number]):
        size = wanted.engine_sizes[number]
        roomy = next((machine for machine in free if len(machine.devices) >= size), None)
        if roomy is None:
            largest = max((len(machine.devices) for machine in free), default=0)
            raise _too_few(
                machines,
                wanted,
                f"engine {number} wants {size} GPUs of one machine, and no machine has more than {largest} left for it",
                "rollout_num_gpus",
            )
        shares[number] = roomy.take(size)
    return [shares[number] for number in sorted(shares)]


def _too_few(machines: Sequence[Host], wanted: Wanted, why: str, name: str) -> ConfigError:
    ranks = f"{wanted.trainer_machines} x {wanted.ranks_per_machine} for the trainer"
    joined = " shared with" if wanted.colocate else " and"
    there = "; ".join(map(str, machines)) or "no machine"
    return ConfigError(
        f"the job wants {ranks}{joined} {sum(wanted.engine_sizes)} for {len(wanted.engine_sizes)} engines, and there "
        f"is {there}: {why}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, or start the rollout service on a "
        "machine of its own",
        field=name,
    )
