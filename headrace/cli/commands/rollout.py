"""`headrace rollout scale N [RUN]`: changes the number of engines of a live run, and shows how they come and go."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.cli.view.lines import Coming
from headrace.cli.words import count
from headrace.client.rollout import RolloutClient
from headrace.errors import InvalidArgument
from headrace.limits import MAX_DRAIN_SECONDS, did_you_mean

_POLL_SECONDS = 0.5
_WAIT_SECONDS = 900.0
_COMMANDS = ("scale",)
_USAGE = "usage:\n  headrace rollout scale N [RUN]  change the number of engines of a live run"


def rollout(argv: Sequence[str]) -> int:
    """Returns 0 once the fleet has the wanted size, 1 when an engine stays down or it takes too long."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if argv[0] not in _COMMANDS:
        raise InvalidArgument(f"unknown command rollout {argv[0][:80]}{did_you_mean(argv[0], _COMMANDS)}\n{_USAGE}")
    parser = argparse.ArgumentParser(prog="headrace rollout scale")
    parser.add_argument("num_engines", metavar="N", type=count, help="engines that there should be, at least 1")
    add_run_argument(parser)
    parser.add_argument("--rollout-address", help="host:port of the rollout service, instead of a run")
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        help="how long the requests of an engine that leaves may take to finish; then they are continued elsewhere "
        "from their tokens (default: 30)",
    )
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait until the engines serve")
    parser.add_argument(
        "--wait-seconds", type=_seconds, default=_WAIT_SECONDS, help="wait no longer than this (default: 900)"
    )
    args = parser.parse_intermixed_args(argv[1:])
    return asyncio.run(_scale(address_of(args.run, "rollout", args.rollout_address), args))


async def _scale(address: str, args: argparse.Namespace) -> int:
    async with RolloutClient(address) as client:
        fleet = await client.get_fleet()
        reply = await client.scale_fleet(args.num_engines, drain_seconds=args.drain_seconds)
        print(_change(reply), flush=True)
        return 0 if args.no_wait else await _watch(client, args, Coming(fleet.engines))


async def _watch(client: RolloutClient, args: argparse.Namespace, coming: Coming) -> int:
    began = time.monotonic()
    while True:
        fleet, passed = await client.get_fleet(), time.monotonic() - began
        for line in coming.news(fleet.engines):
            print(f"{passed:5.0f} s  {line}", flush=True)
        if fleet.wanted_engines != args.num_engines:
            print(f"somebody asked for {fleet.wanted_engines} engines meanwhile: see `headrace status`")
            return 1
        if len(fleet.engines) == args.num_engines and (end := coming.end(fleet.engines)) is not None:
            print(end.sentence)
            return end.exit_code
        if passed > args.wait_seconds:
            print(f"not all serve after {passed:.0f} s; it goes on: see `headrace status`")
            return 1
        await asyncio.sleep(_POLL_SECONDS)


def _change(reply: rollout_pb2.ScaleFleetResponse) -> str:
    parts = [f"{reply.wanted_before} -> {reply.wanted_engines} engines"]
    parts += [f"{', '.join(reply.coming_ids)} to come"] if reply.coming_ids else []
    parts += [f"{', '.join(reply.leaving_ids)} to leave"] if reply.leaving_ids else []
    if len(parts) == 1:
        parts.append("nothing to change" if reply.wanted_before == reply.wanted_engines else "once GPUs are free")
    return "; ".join(parts)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is not a number of seconds from 0 to {MAX_DRAIN_SECONDS:.0f}")
    return seconds
