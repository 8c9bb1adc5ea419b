"""`headrace restart SERVICE | all [RUN]`: restarts services of a live run one after the other, while it trains.

A service is asked to end in order and started again at its address by the launcher that keeps it alive. The next one
is asked when this one serves again; a rollout service serves when an engine has the weights that it had before.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.cli.runs import add_run_argument, find_run
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, FailedPrecondition, HeadraceError, NotFound
from headrace.launch.health import is_serving
from headrace.launch.process import grace_seconds
from headrace.run_folder import ROLLOUT, RunFolder, ServiceEntry, service_of

ORDER = ("reward", "buffer", "rollout", "trainer")
"""A service is restarted after the ones that it calls, and finds them as they will stay."""

_ALL = "all"
_POLL_SECONDS = 0.1
_FLEET_SECONDS = 5.0


def restart(argv: Sequence[str]) -> int:
    """Returns 0 when all of them serve again."""
    parser = argparse.ArgumentParser(
        prog="headrace restart",
        description=f"Restarts services of a live run: one, or all in the order {', '.join(ORDER)}.",
    )
    parser.add_argument("service", metavar="SERVICE", help=f"{', '.join(ORDER)}, one process as rollout-0, or {_ALL}")
    add_run_argument(parser)
    args = parser.parse_args(argv)
    run = find_run(args.run)
    for process in _processes(run, args.service):
        asyncio.run(_restarted(run, process))
    return 0


def _processes(run: RunFolder, asked: str) -> list[str]:
    """Raises NotFound for a name that the run does not have, FailedPrecondition for what no launcher here keeps."""
    services, running = run.services(), run.running_services()
    if asked != _ALL and asked not in services:
        raise NotFound(f"{run.path} has no process {asked[:80]}: there are {', '.join(services)}, and {_ALL}")
    wanted = [name for name in running if asked in (_ALL, name, service_of(name))]
    if not wanted:
        raise FailedPrecondition(
            f"no launcher of {run.path} keeps {'a service' if asked == _ALL else asked} alive: restart it where it was "
            "started, or start it with `headrace up`"
        )
    if asked == _ALL and (elsewhere := {service_of(name) for name in services} - {service_of(name) for name in wanted}):
        print(f"started elsewhere, and left alone: {', '.join(sorted(elsewhere))}", flush=True)
    return sorted(wanted, key=lambda name: (ORDER.index(service_of(name)), name))


async def _restarted(run: RunFolder, process: str) -> None:
    entry = run.services()[process]
    version = await _served_version(entry) if service_of(process) == ROLLOUT else None
    began = time.monotonic()
    seconds = grace_seconds(run.metrics) + run.job().services.start_timeout_seconds
    request = run.restart_request(process)
    request.touch()

    async def until(is_so: Callable[[], bool], what: str) -> None:
        while not is_so():
            if not run.running_services() and time.monotonic() - began > grace_seconds(run.metrics):
                raise FailedPrecondition(f"{run.path} has ended: repeat the command that started it")
            if time.monotonic() - began > seconds:
                request.unlink(missing_ok=True)
                raise DeadlineExceeded(f"{process} {what} after {seconds:.0f} s: see {run.logs / f'{process}.log'}")
            await asyncio.sleep(_POLL_SECONDS)

    await until(lambda: not request.exists(), "was not asked to end")
    await until(lambda: run.services()[process].pid not in (None, entry.pid), "was not started again")
    print(f"{process} ended after {time.monotonic() - began:.0f} s and starts", flush=True)
    serves = asyncio.create_task(_serves(entry, version))
    try:
        await until(serves.done, "does not serve")
        print(f"{process} serves again after {time.monotonic() - began:.0f} s", flush=True)
    finally:
        serves.cancel()


async def _serves(entry: ServiceEntry, version: int | None) -> None:
    while not await is_serving(entry.address):
        await asyncio.sleep(_POLL_SECONDS)
    while version is not None and ((served := await _served_version(entry)) is None or served < version):
        await asyncio.sleep(_POLL_SECONDS)


async def _served_version(entry: ServiceEntry) -> int | None:
    """The policy version of a rollout service's ready engines; None where it has none, or does not answer."""
    async with RolloutClient(entry.address) as client:
        try:
            fleet = await client.get_fleet(deadline_seconds=_FLEET_SECONDS)
        except HeadraceError:
            return None
    ready = [engine for engine in fleet.engines if engine.state == rollout_pb2.ENGINE_STATE_READY]
    return fleet.policy_version if ready else None
