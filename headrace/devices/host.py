"""A machine and its GPUs, as the plan sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
