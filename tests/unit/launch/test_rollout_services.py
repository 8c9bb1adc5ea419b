"""One number in the job starts several rollout services on one ledger; one of them is what it was without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.launch.launcher import Launcher
from headrace.launch.specs import SERVICES
from services.rollout.build import groups_at_once, job_for_replica
from services.rollout.fleet_build import engine_options
from tests.unit.launch.test_shards import after, processes_of

ELSEWHERE = ("--rollout-address", "10.0.0.1:7000,10.0.0.2:7000")
ENGINES = ("--rollout-external-engine-addrs", "e:1", "e:2", "e:3", "e:4")


def test_each_service_has_its_own_process_port_logs_and_number(load_with, tmp_path: Path) -> None:
    launcher = Launcher(load_with("--run-dir", str(tmp_path), "--rollout-services", "2"), SERVICES, print)
    commands = processes_of(launcher)
    assert list(commands) == ["buffer", "reward", "rollout-0", "rollout-1", "trainer"]
    services = [commands[name] for name in ("rollout-0", "rollout-1")]
    assert [after(command, "--number") for command in services] == ["0", "1"]
    logs = launcher.folder.logs
    assert [after(command, "--log-dir") for command in services] == [str(logs / f"rollout-{k}") for k in range(2)]
    addresses = [after(command, "--address") for command in services]
    assert len(set(addresses)) == 2
    assert launcher.job.services.rollout_address == ",".join(addresses)
    assert [each.log_file.name for each in launcher._specs[2:4]] == ["rollout-0.log", "rollout-1.log"]


def test_a_service_by_hand_listens_at_its_own_address_and_knows_of_all(load_with, tmp_path: Path) -> None:
    flags = ("--run-dir", str(tmp_path), *ELSEWHERE, "--buffer-address", "b:1", "--reward-address", "r:1")
    launcher = Launcher(load_with(*flags, "--rollout-service", "1"), ["rollout"], print)
    (only,) = launcher._specs
    assert (only.name, only.address, after(list(only.command), "--number")) == ("rollout", "10.0.0.2:7000", "1")
    assert launcher.job.services.num_rollout_services == 2


def test_services_divide_the_engines_elsewhere_the_cores_and_what_is_generated_at_once(load_with) -> None:
    job = load_with("--rollout-services", "2", "--openai-port", "9000", *ENGINES)
    shares = [job_for_replica(job, number) for number in range(2)]
    assert [each.placement.rollout_external_engine_addrs for each in shares] == [("e:1", "e:2"), ("e:3", "e:4")]
    assert [each.rollout.openai_port for each in shares] == [9000, 9001]
    assert job_for_replica(job, None) is job
    many = load_with("--rollout-services", "64")
    assert engine_options(many).threads == 1

    def of_one(count: int, *flags: str) -> int:
        job = load_with("--rollout-services", str(count), *flags)
        return groups_at_once(job_for_replica(job, 0 if count > 1 else None).rollout)

    at_once = [of_one(count) for count in (1, 2, 3)]
    assert at_once == [8, 2, 2], "two steps' worth; of several a step's, so that the first does not take all"
    stale = ("--max-staleness", "1")
    assert [of_one(count, *stale) for count in (1, 2)] == [8, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rollout-address", "a:1,a:1"), "has an address twice"),
        (("--rollout-services", "3", *ELSEWHERE), "3 contradicts rollout_address, which names 2: leave"),
        ((*ELSEWHERE, "--rollout-service", "2"), "is not an index of the 2 addresses"),
        (("--rollout-service", "0"), "rollout_service has no effect without rollout_address"),
        (("--rollout-services", "3", *ENGINES), "names 4 engines, which 3 rollout services cannot divide evenly"),
        (("--rollout-services", "2", "--rollout-num-gpus", "4", *ENGINES), "2 engines of 1 have 2"),
        (("--rollout-services", "2", "--openai-port", "65535"), "openai_port 65535: rollout service k of 2 listens"),
        (
            ("--rollout-address", "127.0.0.1:1,10.0.0.2:7000", "--update-weight-transport", "ipc"),
            "ipc with rollout at 127.0.0.1:1,10.0.0.2:7000: trainer and engines share no memory",
        ),
    ],
)
def test_services_that_do_not_add_up(load_with, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with(*flags)
