"""Finds the run that a command is about, and the addresses of its services."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from headrace.cli.arg_types import RUNS
from headrace.errors import FailedPrecondition, NotFound, Unavailable
from headrace.rpc.client import connect
from headrace.rpc.tls import OPERATOR, VARIABLE, speaks_tls, tls_of, use_tls
from headrace.run_folder import ROLLOUT, RunFolder, living_runs, newest_run

_ANSWER_SECONDS = 10.0
_SOON = "; one that was started just now is there once its job is checked"


def find_run(text: str | None) -> RunFolder:
    """Calls of this command show the run's certificate from now on.

    Raises NotFound with the runs there are, FailedPrecondition when several runs live and none is named.
    """
    run = _found(text)
    if VARIABLE not in os.environ and run.job_file.is_file():
        use_tls(_of_operator(run.job().services.tls_dir))
    return run


def _of_operator(tls_dir: Path | None) -> Path | None:
    """The folder that `headrace certs` made for commands; where it is not, the services' own, which may do less."""
    if tls_dir is None or not (operator := tls_dir / "clients" / OPERATOR).is_dir():
        return tls_dir
    return operator


def _found(text: str | None) -> RunFolder:
    if text is None:
        return _default_run()
    for path in (Path(text), RUNS / text):
        if (path / "services.json").is_file():
            return RunFolder(path)
    there = sorted(file.parent.name for file in RUNS.glob("*/services.json"))
    raise NotFound(f"no run {text}; runs here: {', '.join(there) or 'none'}{_SOON}")


def _default_run() -> RunFolder:
    living = living_runs(RUNS)
    if len(living) > 1:
        raise FailedPrecondition(
            f"{len(living)} runs are live: {', '.join(run.path.name for run in living)}: name one of them"
        )
    return living[0] if living else newest_run(RUNS)


def address_of(run: str | None, service: str, given: str | None = None) -> str:
    """`given`, else the service's address in the run. Raises FailedPrecondition for a run that has ended.

    Raises Unavailable when nothing there speaks gRPC: a command's own deadline is as long as its longest work.
    """
    address = given or _address_in(find_run(run), service)
    asyncio.run(require_answer(address, service))
    return address


async def require_answer(address: str, service: str) -> None:
    """Raises Unavailable when nothing at the address speaks gRPC.

    All shards of a buffer must, and of several rollout services one.
    """
    asked = {each: asyncio.ensure_future(_answers(each)) for each in address.split(",")}
    for answer in asyncio.as_completed(asked.values()):
        if await answer and service == ROLLOUT:
            break
    others = [call for call in asked.values() if not call.done()]
    for call in others:
        call.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    silent = [each for each, call in asked.items() if not call.cancelled() and not call.result()]
    if len(silent) == len(asked) or (silent and service != ROLLOUT):
        if tls_of() is None and await speaks_tls(silent[0]):
            raise Unavailable(
                f"the {service} service at {silent[0]} takes calls with a certificate only: set {VARIABLE} to a folder "
                "that `headrace certs` made"
            )
        raise Unavailable(
            f"no {service} service answers at {silent[0]} within {_ANSWER_SECONDS:g} s: see `headrace status`"
        )


async def _answers(address: str) -> bool:
    async with connect(address) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _ANSWER_SECONDS)
        except TimeoutError:
            return False
    return True


def _address_in(folder: RunFolder, service: str) -> str:
    services = folder.services()
    if service not in services:
        raise NotFound(f"{folder.path} has no {service} service: its services are {', '.join(services) or 'none'}")
    entry = services[service]
    if entry.pid is not None and not folder.running_services():
        raise FailedPrecondition(
            f"{folder.path} has ended, and its {service} service with it: repeat the command that started it, "
            "or read its files with `headrace status`, `headrace samples` or `headrace audit`"
        )
    return entry.address
