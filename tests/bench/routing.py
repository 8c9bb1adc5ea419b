"""`make bench`: sglang-router divides a step among engines, by each policy; and the engines that compute a prompt.

Sampler and router are the real ones; engines have no model. Prompts begin alike, as with a chat template. A share is
that of the engine with the most samples, where 1 / engines is even.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from headrace.job.schema.job import Job
from headrace.rpc.log import drop_logs
from tests.support.routed_step import RoutedStep, routed_step

POLICIES = ("manual", "cache_aware", "round_robin", "random")


def job_of(policy: str, engines: int, prompts: int, samples: int) -> Job:
    rollout = {"rollout_batch_size": prompts, "n_samples_per_prompt": samples, "router_policy": policy}
    placement = {"rollout_num_gpus": engines}
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "rollout": rollout, "placement": placement})


def line(name: str, steps: list[RoutedStep]) -> str:
    largest = [max(step.shares()) for step in steps]
    prompts = statistics.mean(step.engines_of_a_prompt() for step in steps)
    return f"  {name:36}{statistics.mean(largest):6.0%}{max(largest):7.0%} at most {prompts:6.2f} engines a prompt"


async def measure(steps: int, sizes: list[int], prompts: int, samples: int) -> None:
    for engines in sizes:
        print(f"{engines} engines, a step of {prompts} prompts of {samples} samples: share of the busiest engine")
        for policy in POLICIES:
            job, found = job_of(policy, engines, prompts, samples), []
            for _ in range(steps):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(await routed_step(job, Path(folder)))
            print(line(policy, found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    drop_logs()
    asyncio.run(measure(given.steps, given.engines, given.prompts, given.samples))


if __name__ == "__main__":
    main()
