"""`python -m headrace.launch.ranks.ray NODES RANKS_PER_NODE LOG_DIR COMMAND…`: each rank in an actor of a Ray cluster.

The cluster is RAY_ADDRESS's; without it one is started on this machine, for this run. A placement group holds a bundle
a machine, of GPUs where the cluster has some and of CPUs where not; the first bundle is on this machine, where the
launcher looks for the trainer. An actor runs the command as a process of its own and writes LOG_DIR/trainer-rank-n.log.

placed → run → (one ends badly) → the others end by themselves, or are killed after PEER_SECONDS → exit with its code
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.devices import rank_devices
from headrace.launch.ranks.local import PEER_SECONDS, new_rendezvous
from headrace.process.ended import meaning
from headrace.process.exit_codes import PEER_LOST
from headrace.process.guard import SWEEP_NOW, UNDER_RAY, guard_command
from headrace.process.log_file import open_log, tail

_PLACE_SECONDS = 300.0
_LAST_LINES = 8
_PASSED_ON = ("HEADRACE_", "OMP_", "GOMP_", "PYTHON", "NCCL_", "TORCH_", "GLOO_")


class Rank:
    """One rank's process, on the machine where its actor is."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        """The address of this machine in the cluster."""
        address: str = get_node_ip_address()
        return address

    def run(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> int:
        """Starts the process and waits for its end; 128 + n when signal n ended it."""
        with open_log(Path(self._log)) as output:
            self._process = subprocess.Popen(
                guard_command(0.0, command),
                cwd=folder,
                env=os.environ | environment,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ray may kill the group of an actor that ends
            )
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Sends the signal to the process if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(SWEEP_NOW if number == signal.SIGKILL else number)


class RankActors:
    """All ranks' actors, in a placement group."""

    def __init__(self, num_nodes: int, ranks_per_node: int, log_dir: Path) -> None:
        resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._per_node = ranks_per_node
        self._logs = [log_dir / f"trainer-rank-{rank}.log" for rank in range(num_nodes * ranks_per_node)]
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
                    self._actors[rank].signal.remote(signal.SIGKILL)
            for reference in done:
                rank, code = running.pop(reference), _result(reference)
                if code:
                    failed[rank] = code
        return self._blame(failed)

    def signal(self, number: int) -> None:
        """Sends the signal to all ranks."""
        for actor in self._actors:
            actor.signal.remote(number)

    def _actor(self, rank: int, resource: str, log: str) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank // self._per_node
        )
        share = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": 1}
        # Two at once: a signal while it runs.
        options = {"scheduling_strategy": strategy, "max_concurrency": 2, "runtime_env": {"env_vars": UNDER_RAY}}
        return ray.remote(Rank).options(**options, **share).remote(log)

    def _environment(self, rank: int, host: str, rendezvous: Path) -> dict[str, str]:
        world_size = len(self._actors)
        found = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % self._per_node),
            "LOCAL_WORLD_SIZE": str(self._per_node),
            "HEADRACE_RENDEZVOUS": str(rendezvous),
            **rank_devices(os.environ),
        }
        return found if world_size == self._per_node else found | {"MASTER_ADDR": host}

    def _blame(self, failed: Mapping[int, int]) -> int:
        if not failed:
            return 0
        rank = min(failed, key=lambda rank: failed[rank] == PEER_LOST)
        print(f"rank {rank} ended with {meaning(failed[rank])}; the end of {self._logs[rank]}:", file=sys.stderr)  # noqa: T201  # to the person who started the ranks
        print(tail(self._logs[rank], _LAST_LINES), file=sys.stderr)  # noqa: T201  # to the person who started the ranks
        return failed[rank]


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
        signal.signal(signal.SIGTERM, lambda number, _: actors.signal(number))
        return actors.run(command, rendezvous)
    finally:
        rendezvous.unlink(missing_ok=True)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
