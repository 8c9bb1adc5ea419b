"""`headrace agent [RUN]`: plays the tasks of a run's agent here, on whatever machine this is."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence

from headrace.agent_host.host import AgentHost
from headrace.cli.runs import add_run_argument, address_of
from headrace.cli.words import count
from headrace.client.rollout import RolloutClient
from headrace.rpc.http.trust import trust_authority
from headrace.rpc.log import configure_logging
from headrace.rpc.tls import tls_of

_PATIENCE_SECONDS = 300.0
_CONCURRENCY = 64
_WORKERS = 2


def agent(argv: Sequence[str]) -> int:
    """Plays until a signal, whose tasks go to other hosts, or until the service has been away for five minutes."""
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
    asyncio.run(_play(address_of(args.run, "rollout", args.rollout_address), args))
    return 0


async def _play(address: str, args: argparse.Namespace) -> None:
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
        )
        try:
            await host.run()
        except asyncio.CancelledError:
            _tell(f"stopped after {host.num_played} tasks; those that were played go to other hosts")


def _tell(line: str) -> None:
    print(line, flush=True)
