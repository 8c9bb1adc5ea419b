"""The GPUs of this machine, as nvidia-smi, /sys and CUDA_VISIBLE_DEVICES name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import devices
from headrace.devices import Device
from headrace.errors import ConfigError

ROWS = [
    "0, GPU-5a1b0000-aaaa-bbbb-cccc-000000000000, 00000000:1B:00.0",
    "1, GPU-5a1b1111-aaaa-bbbb-cccc-111111111111, 00000000:43:00.0",
    "2, GPU-77770000-aaaa-bbbb-cccc-222222222222, 00000000:9D:00.0",
]
DEVICES = [Device("0"), Device("1"), Device("2")]
UUIDS = devices._uuids(ROWS)


def test_a_device_has_the_memory_node_that_sys_says(tmp_path: Path) -> None:
    for bus_id, node in (("0000:1b:00.0", "0"), ("0000:43:00.0", "1"), ("0000:9d:00.0", "-1")):
        (tmp_path / bus_id).mkdir()
        (tmp_path / bus_id / "numa_node").write_text(f"{node}\n")
    found = devices.parse_devices(ROWS, tmp_path)
    assert [(device.name, device.numa_node) for device in found] == [("0", 0), ("1", 1), ("2", None)]
    assert devices.parse_devices(ROWS, tmp_path / "absent")[0] == Device("0", "00000000:1B:00.0", None)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("0,2", ["0", "2"]),
        ("2, 1", ["2", "1"]),
        ("", []),
        ("1,-1,0", ["1"]),
        ("GPU-7777", ["2"]),
        ("GPU-5a1b1111-aaaa-bbbb-cccc-111111111111,0", ["1", "0"]),
        ("MIG-12ab", ["MIG-12ab"]),
    ],
)
def test_cuda_visible_devices_leaves_out_what_it_does_not_name(names: str, chosen: list[str]) -> None:
    assert [device.name for device in devices.visible(DEVICES, UUIDS, names)] == chosen


@pytest.mark.parametrize("names", ["3", "0,x", "GPU-5a1b", "GPU-"])
def test_a_name_that_is_no_device_or_two_is_refused_with_those_that_are(names: str) -> None:
    with pytest.raises(ConfigError, match=r"is no GPU of this machine \(there are: 0, 1, 2\)"):
        devices.visible(DEVICES, UUIDS, names)


@pytest.mark.parametrize("names", ["0,0", "1,0,GPU-5a1b1111-aaaa-bbbb-cccc-111111111111", "MIG-12ab,MIG-12ab"])
def test_a_device_that_is_named_twice_is_refused_as_cuda_does(names: str) -> None:
    with pytest.raises(ConfigError, match="twice, with which CUDA finds no device: name each once"):
        devices.visible(DEVICES, UUIDS, names)


def test_a_machine_without_devices_has_none() -> None:
    if not devices.num_gpus():
        assert devices.this_machine({}).devices == []
