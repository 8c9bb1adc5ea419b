"""The GPUs that a process is given are those of the plan: by UUID, which no renumbering changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headrace import devices
from headrace.devices import ORDER
from tests.gpu.devices import NO_GPU

pytestmark = [pytest.mark.gpu, NO_GPU]

SEEN = "import torch; print([str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())])"


def test_a_process_sees_the_devices_that_it_was_given_and_no_other() -> None:
    host = devices.this_machine()
    assert len(host.devices) == torch.cuda.device_count()
    uuids = devices._uuids(devices._rows())
    for device in host.devices:
        given = os.environ | ORDER | {"CUDA_VISIBLE_DEVICES": device.name}
        seen = subprocess.run([sys.executable, "-c", SEEN], env=given, capture_output=True, text=True, timeout=120)
        print(f"GPU {device.name} ({device.pci_bus_id}, memory node {device.numa_node}): {seen.stdout.strip()}")
        assert seen.stdout.strip() == str([uuids[device.name].removeprefix("GPU-")]), seen.stderr[-2000:]
