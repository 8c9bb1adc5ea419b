"""Looks up the hardware of this machine."""

from __future__ import annotations

from pathlib import Path


def num_gpus() -> int:
    """Counts the NVIDIA GPUs that this process can see, without importing torch."""
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])
