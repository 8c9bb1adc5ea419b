"""Carries the ranks' devices past Slurm and Ray, which set CUDA_VISIBLE_DEVICES for what they start."""

from __future__ import annotations

from collections.abc import Mapping

RANK_DEVICES = "HEADRACE_RANK_DEVICES"
"""The ranks' CUDA_VISIBLE_DEVICES on each machine, where Slurm or Ray would set another."""


def rank_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a rank that Slurm or Ray has started."""
    devices = environment.get(RANK_DEVICES)
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
