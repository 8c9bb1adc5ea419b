"""What ranks of machines that each have the job compare before they compute."""

from __future__ import annotations

from typing import Any

from headrace.job.schema.job import Job
from services.trainer.model.build import alike


def options(**sections: Any) -> dict[str, str]:
    return alike(Job.model_validate({"model": {"hf_checkpoint": "/here"}} | sections))


def test_machines_may_differ_in_paths_addresses_and_their_own_numbers() -> None:
    second = options(
        model={"hf_checkpoint": "/there"},
        placement={"node_rank": 1, "master_addr": "first"},
        services={"service_host": "10.0.0.2"},
        critic={"critic_load": "/there/critic"},
    )
    assert second == options()


def test_machines_may_not_differ_in_what_their_ranks_compute() -> None:
    other = options(megatron={"lr": 0.5}, placement={"actor_num_nodes": 3}, run={"seed": 7})
    assert other.items() - options().items() == {
        ("megatron.lr", "0.5"),
        ("placement.actor_num_nodes", "3"),
        ("run.seed", "7"),
    }
