"""Which GPU is whose: a table written by hand, and what holds for every shape that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import devices
from headrace.devices import Device, DevicePlan, Host, Wanted, machine_of, named, plan_devices
from headrace.errors import ConfigError


def machine(name: str, *numa_nodes: int) -> Host:
    """A machine whose device k is close to memory numa_nodes[k]."""
    return Host(name, [Device(str(k), f"0000:{k:02x}:00.0", node) for k, node in enumerate(numa_nodes)])


ALL = "0,1,2,3,4,5,6,7"
ONE = [machine_of("a", 1)]
EIGHT = [machine_of("a", 8)]
TWO_SOCKETS = [machine("a", 0, 0, 0, 0, 1, 1, 1, 1)]
INTERLEAVED = [machine("a", 0, 1, 0, 1, 0, 1, 0, 1)]
FOUR_NODES = [machine("a", 0, 0, 1, 1, 2, 2, 3, 3)]
PAIR = [machine_of("a", 8), machine_of("b", 8)]
UNEQUAL = [machine_of("a", 2), machine_of("b", 8), machine_of("c", 8)]

# machines, (trainer machines, ranks each), engine sizes, colocate → the trainer's shares, the engines' shares
BY_HAND = [
    (EIGHT, (1, 4), [4], False, ["a 0,1,2,3"], ["a 4,5,6,7"]),
    (EIGHT, (1, 4), [1, 1, 1, 1], False, ["a 0,1,2,3"], ["a 4", "a 5", "a 6", "a 7"]),
    (EIGHT, (1, 8), [2, 2, 2, 2], True, [f"a {ALL}"], ["a 0,1", "a 2,3", "a 4,5", "a 6,7"]),
    (ONE, (1, 1), [1], True, ["a 0"], ["a 0"]),
    (TWO_SOCKETS, (1, 2), [4], False, ["a 0,1"], ["a 4,5,6,7"]),
    (TWO_SOCKETS, (1, 2), [2, 4], False, ["a 0,1"], ["a 2,3", "a 4,5,6,7"]),
    (INTERLEAVED, (1, 2), [2, 2, 2], False, ["a 0,2"], ["a 4,6", "a 1,3", "a 5,7"]),
    (INTERLEAVED, (1, 8), [4, 4], True, ["a 0,2,4,6,1,3,5,7"], ["a 0,2,4,6", "a 1,3,5,7"]),
    (FOUR_NODES, (1, 1), [2, 1], False, ["a 0"], ["a 2,3", "a 1"]),
    (PAIR, (2, 4), [4, 4], False, ["a 0,1,2,3", "b 0,1,2,3"], ["a 4,5,6,7", "b 4,5,6,7"]),
    (PAIR, (1, 6), [4, 2], False, ["a 0,1,2,3,4,5"], ["b 0,1,2,3", "a 6,7"]),
    (UNEQUAL, (2, 8), [2], False, [f"b {ALL}", f"c {ALL}"], ["a 0,1"]),
    (UNEQUAL, (1, 2), [8, 8], False, ["a 0,1"], [f"b {ALL}", f"c {ALL}"]),
]


def shown(plan: DevicePlan) -> tuple[list[str], list[str]]:
    trainer = [f"{share.machine} {share.visible}" for share in plan.trainer]
    return trainer, [" + ".join(f"{share.machine} {share.visible}" for share in shares) for shares in plan.engines]


@pytest.mark.parametrize(("machines", "ranks", "sizes", "colocate", "trainer", "engines"), BY_HAND)
def test_devices_are_given_as_the_table_says(machines, ranks, sizes, colocate, trainer, engines) -> None:
    assert shown(plan_devices(machines, Wanted(ranks[0], ranks[1], in_one_part(sizes), colocate))) == (trainer, engines)


def in_one_part(sizes: Sequence[int]) -> list[list[int]]:
    return [[size] for size in sizes]


SHAPES = [
    (layout, ranks_machines, ranks, size, count, colocate)
    for layout in (EIGHT, TWO_SOCKETS, INTERLEAVED, FOUR_NODES, PAIR, UNEQUAL)
    for ranks_machines in (1, 2)
    for ranks in (1, 2, 3, 4, 6, 8)
    for size in (1, 2, 4)
    for count in (1, 2, 3, 4)
    for colocate in (False, True)
]


def test_whatever_fits_is_placed_and_no_device_is_given_twice() -> None:
    """Shapes of which a machine has too few devices are refused; all others are placed, each engine on one machine."""
    placed = 0
    for machines, trainer_machines, ranks, size, count, colocate in SHAPES:
        wanted = Wanted(trainer_machines, ranks, [[size]] * count, colocate)
        if not fits(machines, wanted):
            with pytest.raises(ConfigError):
                plan_devices(machines, wanted)
            continue
        plan = plan_devices(machines, wanted)
        placed += 1
        parts = (plan.trainer, [share for shares in plan.engines for share in shares])
        trainer, engines = ([(s.machine, d) for s in part for d in s.devices] for part in parts)
        assert len({share.machine for share in plan.trainer}) == trainer_machines
        assert [len(share.devices) for share in plan.trainer] == [ranks] * trainer_machines
        assert [[len(share.devices) for share in shares] for shares in plan.engines] == [[size]] * count
        assert len(set(trainer)) == len(trainer)
        assert len(set(engines)) == len(engines)
        assert set(engines) <= set(trainer) if colocate else not set(engines) & set(trainer)
        there = {(each.name, device) for each in machines for device in each.devices}
        assert {*trainer, *engines} <= there
    assert placed > 300, placed


def fits(machines: list[Host], wanted: Wanted) -> bool:
    """Counts alone: the trainer takes the first machines that are large enough, engines of one size fill the rest."""
    left = [len(each.devices) for each in machines]
    large = [k for k, count in enumerate(left) if count >= wanted.ranks_per_machine][: wanted.trainer_machines]
    if len(large) < wanted.trainer_machines:
        return False
    if wanted.colocate:
        left = [wanted.ranks_per_machine if k in large else 0 for k in range(len(left))]
    else:
        left = [count - wanted.ranks_per_machine * (k in large) for k, count in enumerate(left)]
    (size,) = wanted.engines[0]
    return sum(count // size for count in left) >= len(wanted.engines)


def test_too_few_devices_are_refused_with_what_is_there_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_devices([machine("node-1", 0, 0, 1, 1)], Wanted(1, 4, [[2], [2]]))
    for said in ("1 x 4 for the trainer and 4 for 2 engines", "GPU 2-3 (NUMA 1)", "--actor-num-gpus-per-node"):
        assert said in refused.value.message
    with pytest.raises(ConfigError, match=r"0 of 1 have 16 GPUs for the trainer, and it wants 1 such machine"):
        plan_devices(EIGHT, Wanted(1, 16, [[1]]))
    with pytest.raises(ConfigError, match=r"shared with 8 for 1 engines.*no machine has more than 4 left"):
        plan_devices(EIGHT, Wanted(1, 4, [[8]], colocate=True))


def test_names_of_devices_are_short() -> None:
    assert named([Device(name) for name in ("0", "1", "2", "5", "7", "8")]) == "GPU 0-2, 5, 7-8"
    assert named([Device("MIG-1f0e"), Device("MIG-2c0d")]) == "GPU MIG-1f0e, MIG-2c0d"


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
        ("2, 1", ["2", "1"]),
        ("", []),
        ("1,-1,0", ["1"]),
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


def test_a_device_that_is_named_twice_is_refused_as_cuda_does() -> None:
    names = "1,0,GPU-5a1b1111-aaaa-bbbb-cccc-111111111111"
    with pytest.raises(ConfigError, match="twice, with which CUDA finds no device: name each once"):
        devices.visible(DEVICES, UUIDS, names)
