"""The GPUs of a machine, and which of them the trainer's ranks and each engine get."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. `name` is what CUDA_VISIBLE_DEVICES calls it, and `numa_node` the memory that it is close to, if known."""

    name: str
    pci_bus_id: str = ""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with the devices that a job may use on it."""

    name: str
    devices: Sequence[Device]

    def nearest_first(self) -> list[Device]:
        """The devices, those of one NUMA node together, each node's in the order of the PCI bus."""
        return sorted(self.devices, key=lambda device: (device.numa_node or 0, device.pci_bus_id))

    def __str__(self) -> str:
        """`node-1: GPU 0-3 (NUMA 0), GPU 4-7 (NUMA 1)`."""
        nodes = {device.numa_node: None for device in self.nearest_first()}
        parts = [
            named([device for device in self.devices if device.numa_node == node])
            + ("" if node is None else f" (NUMA {node})")
            for node in nodes
        ]
        return f"{self.name}: {', '.join(parts) or 'no GPU'}"


def named(devices: Sequence[Device]) -> str:
    """`GPU 0-3`, `GPU 0, 2, 5`, or the names that the devices have."""
    names = [device.name for device in devices]
    if not all(name.isdecimal() for name in names):
        return f"GPU {', '.join(names)}"
    stretches: list[list[int]] = []
    for number in sorted(map(int, names)):
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return "GPU " + ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in stretches)


def machine_of(name: str, num_devices: int) -> Host:
    """A machine of which only the number of its devices is known."""
    return Host(name, [Device(str(number)) for number in range(num_devices)])


# Finds the NVIDIA GPUs of this machine, without importing torch.
#
# `nvidia-smi` names them in the order of the PCI bus, and /sys says which memory each is close to. CUDA_VISIBLE_DEVICES
# leaves some out, as it does for every program.

_ASK = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Of x86 and of ARM, in /proc/cpuinfo."""
_SECONDS = 30.0
"""The first call after a start of the machine loads the driver."""

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers then mean the same to CUDA as to nvidia-smi."""


def this_machine(environment: Mapping[str, str] = os.environ) -> Host:
    """This machine with the devices that are there and that CUDA_VISIBLE_DEVICES allows. No device on a CPU machine."""
    rows = _rows()
    devices = parse_devices(rows) if rows else [Device(str(number)) for number in range(num_gpus())]
    names = environment.get("CUDA_VISIBLE_DEVICES")
    return Host(socket.gethostname(), devices if names is None else visible(devices, _uuids(rows), names))


def num_gpus() -> int:
    """Counts the GPUs that this process can open."""
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True for a CPU that computes with bfloat16; True also where nobody knows."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return True
    return not words.isdisjoint(_BFLOAT16)


def gpu_memory_bytes() -> int | None:
    """The memory of the smallest GPU; None where nvidia-smi is not installed or does not say."""
    program = shutil.which(_ASK[0])
    if program is None:
        return None
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return min((int(line) << 20 for line in asked.stdout.split()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_devices(rows: Sequence[str], sys_bus: Path = Path("/sys/bus/pci/devices")) -> list[Device]:
    """Reads `nvidia-smi`'s lines: number, UUID, PCI bus id."""
    devices = []
    for row in rows:
        number, _, bus_id = (word.strip() for word in row.split(","))
        devices.append(Device(number, bus_id, _numa_node(sys_bus, bus_id)))
    return devices


def visible(devices: Sequence[Device], uuids: Mapping[str, str], names: str) -> list[Device]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names, by number or UUID, up to -1, which ends the list.

    `uuids` maps each device's name to its UUID. A slice of a GPU (MIG-…) is a device by its own name. Raises
    ConfigError for another name, and for a device that is named twice, with which CUDA finds none at all.
    """
    chosen: list[Device] = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        if name == "-1":
            break
        if name.startswith("MIG-"):
            chosen.append(Device(name))
            continue
        found = [d for d in devices if name == d.name or (len(name) > 4 and uuids.get(d.name, "").startswith(name))]
        if len(found) != 1:
            there = ", ".join(device.name for device in devices) or "none"
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES {names!r}: {name!r} is no GPU of this machine (there are: {there}); correct it, "
                "or unset it to use all",
                field="CUDA_VISIBLE_DEVICES",
            )
        chosen += found
    if twice := next((device.name for device in chosen if chosen.count(device) > 1), None):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES {names!r} names {twice} twice, with which CUDA finds no device: name each once",
            field="CUDA_VISIBLE_DEVICES",
        )
    return chosen


def _rows() -> list[str]:
    """Empty where nvidia-smi is not installed or fails, as in some containers: then devices are known by number."""
    program = shutil.which(_ASK[0])
    try:
        return _answer(program) if program else []
    except (OSError, subprocess.SubprocessError):
        return []


@cache
def _answer(program: str) -> list[str]:
    """Asked once by a process: devices do not come and go, and an answer takes seconds on a machine of many."""
    asked = subprocess.run([program, *_ASK[1:]], capture_output=True, text=True, timeout=_SECONDS, check=True)
    return [line for line in asked.stdout.splitlines() if line.count(",") == 2]


def _uuids(rows: Sequence[str]) -> dict[str, str]:
    return {number.strip(): uuid.strip() for number, uuid, _ in (row.split(",") for row in rows)}


def _numa_node(sys_bus: Path, bus_id: str) -> int | None:
    """/sys writes the domain of a bus id with four digits, nvidia-smi with eight; -1 is a machine with one node."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sys_bus / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# Gives each GPU to at most one process: first the trainer's ranks, then the engines, or both to the same ones.
#
# The trainer takes as many devices on each of the first machines, engines what is left. Devices of one NUMA node are
# taken together, and an engine lies in one node wherever a node has room for it. An engine of several parts has each on
# a machine of its own, where there are several machines. The plan is a pure function of names.


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job's demand for devices. `engines` are, in the engines' order, the GPUs of each part of an engine."""

    trainer_machines: int
    ranks_per_machine: int
    engines: Sequence[Sequence[int]]
    colocate: bool = False

    @property
    def num_engine_devices(self) -> int:
        """The devices of all engines together."""
        return sum(map(sum, self.engines))


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
    """The trainer has a share of each of its machines, and an engine a share for each of its parts."""

    trainer: Sequence[DeviceShare]
    engines: Sequence[Sequence[DeviceShare]]


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


def _of_engines(free: Sequence[_Free], machines: Sequence[Host], wanted: Wanted) -> list[list[DeviceShare]]:
    """Large engines choose first, so that small ones do not leave them scattered devices."""
    shares: dict[int, list[DeviceShare]] = {}
    for number in sorted(range(len(wanted.engines)), key=lambda number: -sum(wanted.engines[number])):
        shares[number] = []
        for part, size in enumerate(wanted.engines[number]):
            taken = {share.machine for share in shares[number]} if len(free) > 1 else set()
            others = [machine for machine in free if machine.name not in taken]
            roomy = next((machine for machine in others if len(machine.devices) >= size), None)
            if roomy is None:
                largest = max((len(machine.devices) for machine in others), default=0)
                whose = f"engine {number}" + f" on machine {part + 1} of {len(wanted.engines[number])}" * (part > 0)
                raise _too_few(
                    machines,
                    wanted,
                    f"{whose} wants {size} GPUs of one machine, and no machine has more than {largest} left for it",
                    "rollout_num_gpus",
                )
            shares[number].append(roomy.take(size))
    return [shares[number] for number in sorted(shares)]


def _too_few(machines: Sequence[Host], wanted: Wanted, why: str, name: str) -> ConfigError:
    ranks = f"{wanted.trainer_machines} x {wanted.ranks_per_machine} for the trainer"
    joined = " shared with" if wanted.colocate else " and"
    there = "; ".join(map(str, machines)) or "no machine"
    return ConfigError(
        f"the job wants {ranks}{joined} {wanted.num_engine_devices} for {len(wanted.engines)} engines, and there "
        f"is {there}: {why}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, or start the rollout service on a "
        "machine of its own",
        field=name,
    )


RANK_DEVICES = "HEADRACE_RANK_DEVICES"
"""The ranks' CUDA_VISIBLE_DEVICES on each machine, where Slurm or Ray would set another."""


def rank_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a rank that Slurm or Ray has started."""
    devices = environment.get(RANK_DEVICES)
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
