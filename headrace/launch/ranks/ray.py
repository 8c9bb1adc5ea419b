"""`python -m headrace.launch.ranks.ray NODES RANKS_PER_NODE LOG_DIR COMMAND…`: each rank in an actor of a Ray cluster.

The cluster is RAY_ADDRESS's; without it one is started on this machine, for this run. A placement group holds a bundle
a machine, of GPUs where the cluster has some and of CPUs where not; the first bundle is on this machine, where the
launcher looks for the trainer. An actor runs the command as a process of its own and writes LOG_DIR/trainer-rank-n.log.

placed → run → (one ends badly) → the others end by themselves, or are killed after PEER_SECONDS → exit with its code
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.devices import rank_devices
from headrace.launch.ranks.local import (
    PEER_SECONDS,
    RENDEZVOUS,
    new_rendezvous,
    rank_environment,
    rank_log,
    rank_to_blame,
    tell_of_end,
)
from headrace.process.child import Child
from headrace.process.exit_status import meaning
from headrace.process.guard import UNDER_RAY

_PLACE_SECONDS = 300.0
_STOP_SECONDS = 3600.0
"""The launcher decides how long it may take, and it is less."""
_PASSED_ON = ("HEADRACE_", "OMP_", "GOMP_", "PYTHON", "NCCL_", "TORCH_", "GLOO_")


class Rank:
    """One rank's process, on the machine where its actor is."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self._child: Child | None = None

    def host(self) -> str:
        """The address of this machine in the cluster."""
        address: str = get_node_ip_address()
        return address

    async def run(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> int:
        """Starts the process and waits for its end; 128 + n when signal n ended it."""
        os.chdir(folder)
        self._child = Child(command, self._log, environment)
        await self._child.start()
        return await self._child.wait()

    async def stop(self, grace_seconds: float) -> None:
        """Asks the process to end, and kills it after the grace period."""
        if self._child is not None:
            await self._child.stop(grace_seconds)


class RankActors:
    """All ranks' actors, in a placement group."""

    def __init__(self, num_nodes: int, ranks_per_node: int, log_dir: Path) -> None:
        resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._per_node = ranks_per_node
        self._logs = [rank_log(log_dir, rank) for rank in range(num_nodes * ranks_per_node)]
        bundles = [{resource: float(ranks_per_node)} for _ in range(num_nodes)]
        bundles[0][f"node:{get_node_ip_address()}"] = 0.001
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(_PLACE_SECONDS):
            sys.exit(
                f"Ray has no room for {num_nodes} x {ranks_per_node} {resource}s within {_PLACE_SECONDS:.0f} s "
                f"(it has {ray.available_resources()}): add machines, or lower --actor-num-nodes or "
                "--actor-num-gpus-per-node"
            )
        self._actors = [self._actor(rank, resource, str(log)) for rank, log in enumerate(self._logs)]

    def run(self, command: Sequence[str], rendezvous: Path) -> int:
        """Returns when all ranks have ended: the exit code of the rank to blame, or 0."""
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        host = ray.get(self._actors[0].host.remote(), timeout=_PLACE_SECONDS)
        running = {
            actor.run.remote(command, str(Path.cwd()), passed_on | self._environment(rank, host, rendezvous)): rank
            for rank, actor in enumerate(self._actors)
        }
        failed: dict[int, int] = {}
        while running:
            done, _ = ray.wait(list(running), timeout=PEER_SECONDS if failed else None)
            if not done:
                for rank in running.values():
                    self._actors[rank].stop.remote(0.0)
            for reference in done:
                rank, code = running.pop(reference), _result(reference)
                if code:
                    failed[rank] = code
        if not failed:
            return 0
        rank = rank_to_blame(failed)
        tell_of_end(rank, meaning(failed[rank]), self._logs[rank])
        return failed[rank]

    def stop(self) -> None:
        """Asks all ranks to end."""
        for actor in self._actors:
            actor.stop.remote(_STOP_SECONDS)

    def _actor(self, rank: int, resource: str, log: str) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank // self._per_node
        )
        share = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": 1}
        options = {"scheduling_strategy": strategy, "runtime_env": {"env_vars": UNDER_RAY}}
        return ray.remote(Rank).options(**options, **share).remote(log)

    def _environment(self, rank: int, host: str, rendezvous: Path) -> dict[str, str]:
        found = {
            **rank_environment(rank, len(self._actors), self._per_node),
            RENDEZVOUS: str(rendezvous),
            **rank_devices(os.environ),
        }
        return found if len(self._actors) == self._per_node else found | {"MASTER_ADDR": host}


def _result(reference: Any) -> int:
    try:
        code: int = ray.get(reference)
    except ray.exceptions.RayActorError as error:  # its machine or its worker process is gone
        print(f"an actor died: {error}", file=sys.stderr)  # noqa: T201  # to the person who started the ranks
        return 128 + signal.SIGKILL
    return code


def main(argv: list[str]) -> int:
    """Returns 0 when all ranks ended well, else the exit code of the rank to blame."""
    num_nodes, ranks_per_node, log_dir, command = int(argv[0]), int(argv[1]), Path(argv[2]), argv[3:]
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        cpus = max(num_nodes * ranks_per_node, len(os.sched_getaffinity(0)))
        ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    rendezvous = new_rendezvous(log_dir)
    try:
        actors = RankActors(num_nodes, ranks_per_node, log_dir)
        signal.signal(signal.SIGTERM, lambda *_: actors.stop())
        return actors.run(command, rendezvous)
    finally:
        rendezvous.unlink(missing_ok=True)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
