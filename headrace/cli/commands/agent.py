"""`headrace agent [RUN]`: plays the tasks of a run's agent here, on whatever machine this is."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence

from headrace.agent_host import AgentHost
from headrace.cli.runs import add_run_argument, address_of, find_run
from headrace.cli.words import count
from headrace.client.rollout import RolloutClient
from headrace.rpc.log import configure_logging
from headrace.rpc.tls import tls_of, trust_authority

_PATIENCE_SECONDS = 300.0
_CONCURRENCY = 64
_WORKERS = 2


def agent(argv: Sequence[str]) -> int:
    """Plays until a signal, whose tasks go to other hosts, or until the rollout service has ended.

    Raises Unavailable where that is away for five minutes without having said that it ends.
    """
    parser = argparse.ArgumentParser(
        prog="headrace agent",
        description="Plays tasks of a job with --agent-hosts, and says what came of them to its rollout service.",
    )
    add_run_argument(parser)
    parser.add_argument("--rollout-address", help="host:port of the rollout service, instead of a run")
    parser.add_argument("--agent-function-path", help="pkg.mod.fn or file.py:fn here (default: the one the job names)")
    parser.add_argument("--concurrency", type=count, default=_CONCURRENCY, help="tasks played at once")
    parser.add_argument("--workers", type=count, default=_WORKERS, help="processes that play them")
    args = parser.parse_intermixed_args(argv)
    configure_logging("agent")
    if folder := tls_of():
        trust_authority(folder)  # the URL that agents are given is https
    address = address_of(args.run, "rollout", args.rollout_address)
    asyncio.run(_play(address, args, _run_is_over(args)))
    return 0


def _run_is_over(args: argparse.Namespace) -> Callable[[], bool]:
    """A run of this machine is over when none of its services is kept alive; of another one nothing is known."""
    run = None if args.rollout_address else find_run(args.run)
    if run is None or not run.running_services():
        return lambda: False
    return lambda: not run.running_services()


async def _play(address: str, args: argparse.Namespace, is_over: Callable[[], bool]) -> None:
    loop, playing = asyncio.get_running_loop(), asyncio.current_task()
    assert playing is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, playing.cancel)
    async with RolloutClient(address) as rollout:
        host = AgentHost(
            rollout,
            args.agent_function_path,
            concurrency=args.concurrency,
            workers=min(args.workers, args.concurrency),
            patience_seconds=_PATIENCE_SECONDS,
            tell=_tell,
            is_over=is_over,
        )
        try:
            await host.run()
            _tell(f"the rollout service has ended: stopped after {host.num_played} tasks")
        except asyncio.CancelledError:
            _tell(f"stopped after {host.num_played} tasks; those that were played go to other hosts")


def _tell(line: str) -> None:
    print(line, flush=True)
