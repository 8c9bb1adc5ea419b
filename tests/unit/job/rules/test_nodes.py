"""A trainer over several machines that each start their own ranks: where they meet, and what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.rules.machines import check_meeting, check_nodes, meeting_of
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.specs import folder_here, spec

SERVICES = {
    "buffer_address": "10.0.0.1:7001",
    "rollout_address": "10.0.0.2:7002",
    "trainer_address": "10.0.0.7:7004",
}
TRAINER = Scope(["trainer"])


def job_of(services: dict[str, str] = SERVICES, /, **placement: object) -> Job:
    places = {"actor_num_nodes": 2, "master_addr": "10.0.0.7", **placement}
    sections = {"model": {"hf_checkpoint": "m"}, "run": {"run_dir": "/runs", "run_name": "r"}}
    return Job.model_validate({**sections, "services": services, "placement": places})


def test_machines_meet_where_the_flags_say_else_where_torchruns_variables_say() -> None:
    exported = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000", "NODE_RANK": "1"}
    meeting = meeting_of(job_of(master_addr=None).placement, exported)
    assert meeting is not None
    assert (meeting.node_rank, str(meeting.address)) == (1, "10.0.0.9:4000")
    meeting = meeting_of(job_of(node_rank=0, master_addr="fd77::7", master_port=5000).placement, exported)
    assert meeting is not None
    assert (meeting.node_rank, str(meeting.address)) == (0, "[fd77::7]:5000")
    meeting = meeting_of(job_of().placement, {})
    assert meeting is not None
    assert (meeting.node_rank, str(meeting.address)) == (0, "10.0.0.7:29500")
    assert meeting_of(job_of(actor_num_nodes=1, master_addr=None).placement, exported) is None


@pytest.mark.parametrize(
    ("placement", "exported", "message"),
    [
        ({"master_addr": None}, {}, "actor_num_nodes 2: pass --master-addr ADDRESS-OF-MACHINE-0"),
        ({"node_rank": 2}, {}, "node_rank 2 is none of 2 machines, which are counted from 0"),
    ],
)
def test_a_machine_that_cannot_know_its_place_is_refused(
    placement: dict[str, object], exported: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        meeting_of(job_of(**placement).placement, exported)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"actor_num_nodes": 1}, "master_addr has no effect with actor_num_nodes 1"),
        ({"master_addr": None, "node_rank": 0, "placement": "ray"}, "node_rank has no effect .* placement ray"),
    ],
)
def test_an_option_of_several_machines_without_them_is_refused(placement: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_nodes(job_of(**placement))


@pytest.mark.parametrize(
    ("services", "placement", "scope", "message"),
    [
        (SERVICES, {"master_addr": "localhost"}, TRAINER, "master_addr localhost is each machine's own"),
        (SERVICES | {"trainer_address": "127.0.0.1:1"}, {}, TRAINER, "pass --trainer-address 10.0.0.7:7004"),
        (SERVICES, {"node_rank": 1}, Scope(["reward", "trainer"]), "use `headrace up trainer` here"),
    ],
)
def test_machines_that_could_not_find_each_other_are_refused(
    services: dict[str, str], placement: dict[str, object], scope: Scope, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_meeting(job_of(services, **placement), scope)


def test_another_machine_has_a_folder_of_its_own_in_the_runs_and_is_ready_when_machine_0_serves() -> None:
    first, second = job_of(), job_of(node_rank=1)
    assert folder_here(first, ["trainer"]).path == Path("/runs/r")
    assert folder_here(second, ["trainer"]).path == Path("/runs/r/node-1")
    found = spec(second, "trainer", folder_here(second, ["trainer"]))
    words = list(found.command)
    assert words[words.index("--run-dir") + 1] == "/runs/r"  # checkpoints are the run's
    assert (found.serves, found.asked_at) == (False, "10.0.0.7:7004")
    assert spec(first, "trainer", folder_here(first, ["trainer"])).serves
