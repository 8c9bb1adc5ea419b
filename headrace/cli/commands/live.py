"""`headrace status | restart | rollout scale | agent`: what one sees and does at a run that is live."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.agent_host import AgentHost
from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.arg_types import COUNT, Finite, Group, json_option, print_json, rollout_address_option, run_argument
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import Coming, duration, failures_line, print_no_wrap
from headrace.cli.view.run_view import WARNING_CHARACTERS, awaited, waits_too_long
from headrace.client.open import open_buffer, open_rollout
from headrace.client.rollout import RolloutClient
from headrace.client.trainer import TrainerClient
from headrace.errors import DataLoss, DeadlineExceeded, FailedPrecondition, HeadraceError, NotFound
from headrace.hooks.agent_command import of_commands
from headrace.launch.health import is_serving
from headrace.launch.previous_run import checkpoints_of, has_ended, previous_run, scored_by
from headrace.launch.process import grace_seconds
from headrace.ledger_tools.audit_run import damage_line
from headrace.limits import MAX_DRAIN_SECONDS, one_line
from headrace.process.exit_status import ExitStatus
from headrace.process.log_file import doing
from headrace.rpc.log import configure_logging
from headrace.rpc.tls import tls_of, trust_authority
from headrace.run_folder import BUFFER, ROLLOUT, RunFolder, ServiceEntry, service_of

ORDER = ("reward", "buffer", "rollout", "trainer")
"""A service is restarted after the ones that it calls, and finds them as they will stay."""

_ALL = "all"
_PATIENCE_SECONDS = 3.0
_MAX_DAMAGES_SHOWN = 20
_SILENT = "does not answer"
_RESTART_POLL_SECONDS = 0.1
_FLEET_SECONDS = 5.0
_POLL_SECONDS = 0.5
_AGENT_PATIENCE_SECONDS = 300.0


@click.command()
@run_argument
@json_option
def status(run: str | None, as_json: bool) -> int:
    """Shows the services of a run, its trainer, its engines, its ledger.

    The exit code is 0 when every service serves or the run has finished, else 1.
    """
    folder = find_run(run)
    return _ended(folder, as_json=as_json) if has_ended(folder) else asyncio.run(_status(folder, as_json=as_json))


def _ended(folder: RunFolder, *, as_json: bool) -> int:
    """Returns 0 for a run that has finished, and 1 for one that the same command would continue."""
    previous = previous_run(folder)
    steps, wanted = (previous.saved_step, previous.job.rollout.num_rollout) if previous else (None, None)
    is_finished = steps is not None and wanted is not None and steps >= wanted
    ending = None if is_finished else ExitStatus.read(folder.exit_status)
    checkpoints = _checkpoints(folder)
    if as_json:
        state = "finished" if is_finished else "interrupted" if previous else "unreadable"
        reason = ending.message if ending else None
        said = {"state": state, "saved_step": steps, "num_steps": wanted, "reason": reason, "checkpoints": checkpoints}
        print_json({"run": folder.path, **said})
    elif previous is None:
        print(f"{folder.path}: ended; its job.json cannot be read, so its progress is unknown")
    elif is_finished:
        print(
            f"{folder.path}: finished {wanted} of {wanted} steps; `headrace samples` and `headrace export` can read it"
        )
    else:
        if ending:
            print(f"{folder.path}: the trainer ended: {ending.message}")
        print(
            f"{folder.path}: ended; its checkpoints hold {steps} of {wanted} steps: the command that started it "
            f"continues from there; the logs in {folder.logs} say why it ended"
        )
    if not as_json:
        _print_checkpoints(checkpoints)
    return 0 if is_finished else 1


async def _status(folder: RunFolder, *, as_json: bool) -> int:
    services = folder.services()
    asked = await asyncio.gather(*(_State.of(name, entry.address) for name, entry in services.items()))
    states = dict(zip(services, asked, strict=True))
    running = folder.running_services()
    silent = [name for name, state in states.items() if state.detail == _SILENT and name in running]
    details = {name: state.detail for name, state in states.items()}
    details |= {name: _not_ready(folder, name) for name in silent}
    trainer, fleet, stats = (states[name].said if name in states else None for name in ("trainer", ROLLOUT, BUFFER))
    waiting = None
    if isinstance(trainer, trainer_pb2.GetStatusResponse) and waits_too_long(trainer, folder.metrics):
        waiting = awaited(trainer, fleet, stats)
    if as_json:
        tree = {
            name: {
                "address": services[name].address,
                "pid": services[name].pid,
                "serves": state.serves,
                "detail": details[name],
                "status": state.said,
            }
            for name, state in states.items()
        }
        said = {"state": "running", "services": tree, "waiting": waiting, "checkpoints": _checkpoints(folder)}
        print_json({"run": folder.path, **said})
    else:
        table = Table("service", "address", "process", "state", title=str(folder.path), title_justify="left", box=None)
        for name, detail in details.items():
            table.add_row(name, *_where(name, services), Text(detail))
        print_no_wrap(Console(), table)
        _print_checkpoints(_checkpoints(folder))
        if waiting:
            print(waiting)
    return 0 if all(state.serves for state in states.values()) else 1


def _checkpoints(folder: RunFolder) -> Sequence[_Checkpoint]:
    previous = previous_run(folder)
    found = checkpoints_of(folder, previous.job) if previous else {}
    return [_Checkpoint(step, path, scored_by(path)) for step, path in sorted(found.items())]


def _print_checkpoints(checkpoints: Sequence[_Checkpoint]) -> None:
    if not checkpoints:
        return
    table = Table("checkpoint", "samples since the one before, by scorer", box=None)
    for each in checkpoints:
        table.add_row(each.path.name, Text("\n".join(f"{count} {who}" for who, count in each.scored_by.items()) or "–"))
    print_no_wrap(Console(), table)


def _where(name: str, services: Mapping[str, ServiceEntry]) -> tuple[str, str]:
    """(address, process); those of a service of several processes are in the rows of these."""
    processes = [each for each in services if each != name and service_of(each) == name]
    if processes:
        return f"{len(processes)} {'shards' if name == BUFFER else 'services'}", "–"
    return services[name].address, str(services[name].pid or "elsewhere")


def _not_ready(folder: RunFolder, name: str) -> str:
    last = doing(folder.logs / f"{name}.log", 0)
    return "its process runs and does not serve yet" + (f", last: {last}" if last else "")


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    path: Path
    scored_by: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _State:
    """A service that waits for its database does not serve, and says so in `detail`."""

    serves: bool
    detail: str
    said: Any = None
    """The service's own status message; None if there is none."""

    @classmethod
    async def of(cls, name: str, address: str) -> _State:
        serves = all(await asyncio.gather(*map(is_serving, address.split(","))))
        try:
            match service_of(name):
                case "trainer":
                    async with TrainerClient(address, deadline_seconds=_PATIENCE_SECONDS) as trainer:
                        status = await trainer.status()
                    return cls(serves, _of_trainer(status), status)
                case "rollout":
                    async with open_rollout(address, deadline_seconds=_PATIENCE_SECONDS) as rollout:
                        fleet = await rollout.get_fleet()
                    return cls(serves, _of_fleet(fleet), fleet)
                case "buffer":
                    return await cls._of_buffer(address, serves=serves)
        except DeadlineExceeded:
            return cls(serves, _SILENT)
        except HeadraceError as error:
            return cls(serves, error.message)
        return cls(serves, "serving" if serves else _SILENT)

    @classmethod
    async def _of_buffer(cls, address: str, *, serves: bool) -> _State:
        async with open_buffer(address, deadline_seconds=_PATIENCE_SECONDS) as buffer:
            damaged = "".join(f"\ndamaged: {damage_line(one)}" for one in (await buffer.damage())[:_MAX_DAMAGES_SHOWN])
            try:
                stats = await buffer.stats("train")
            except DataLoss as error:
                return cls(serves, f"{error.message}{damaged}")
        return cls(serves, f"{_of_ledger(stats)}{damaged}", stats)


def _of_trainer(said: trainer_pb2.GetStatusResponse) -> str:
    ranks = f"{said.world_size} rank{'s' if said.world_size > 1 else ''}"
    phase = trainer_pb2.Phase.Name(said.phase).removeprefix("PHASE_").lower()
    if said.phase == trainer_pb2.PHASE_WAITING and not said.num_steps:
        return f"clients of Tinker's API say what is trained, {ranks}"
    if said.phase == trainer_pb2.PHASE_WAITING:
        phase = f"waiting for {duration(said.waiting_seconds)}, {said.groups_ready}/{said.groups_per_step} groups ready"
    is_beside = said.HasField("evaluating_step") and said.phase != trainer_pb2.PHASE_EVALUATING
    beside = f", the evaluation of step {said.evaluating_step} runs" if is_beside else ""
    return f"step {said.step}/{said.num_steps} {phase}{beside}, policy version {said.policy_version}, {ranks}"


def _of_fleet(fleet: rollout_pb2.GetFleetResponse) -> str:
    engines = ", ".join(
        f"{engine.engine_id} {rollout_pb2.EngineState.Name(engine.state).removeprefix('ENGINE_STATE_').lower()} "
        f"version {engine.policy_version}{f' of group {engine.group}' if engine.group else ''}"
        for engine in fleet.engines
    )
    samples = (
        f"{fleet.samples_in_flight} samples in flight, {fleet.samples_being_scored} being scored, "
        f"{fleet.groups_in_flight}/{fleet.max_groups_in_flight} groups"
    )
    waiting = "".join(f", {each.waiting} requests of {each.kind} wait" for each in fleet.requests if each.waiting)
    warnings = "".join(f"\n{one_line(warning, WARNING_CHARACTERS)}" for warning in fleet.warnings)
    staying = sum(engine.state != rollout_pb2.ENGINE_STATE_LEAVING for engine in fleet.engines)
    wanted = f" ({fleet.wanted_engines} wanted)" if fleet.wanted_engines not in (0, staying) else ""
    return f"{engines or 'no engines'}{wanted}; {samples}{waiting}, {fleet.groups_produced} groups produced{warnings}"


def _of_ledger(stats: buffer_pb2.StreamStats) -> str:
    groups = ", ".join(f"{count} {name.lower()}" for name, count in sorted(stats.groups.items()) if count)
    mix = "".join(
        f"\n{source.name} (weight {source.weight:g}): {source.prompts_read} prompts read, {source.ready} groups ready, "
        f"{source.batched} in batches"
        for source in stats.sources
    )
    trouble = f"; no prompts: {stats.trouble}" if stats.trouble else ""
    failures = f"\n{line}" if (line := failures_line(stats.production)) else ""
    return f"step {stats.step} (committed {stats.committed_step}); groups: {groups or 'none'}{mix}{trouble}{failures}"


@click.command()
@click.argument("service")
@run_argument
def restart(service: str, run: str | None) -> int:
    """Restarts services of a live run one after the other, while it trains.

    SERVICE is reward, buffer, rollout or trainer, one process as rollout-0, or all. A service ends in order, and the
    launcher that keeps it alive starts it again at its address. The next one is asked when this one serves again; a
    rollout service serves when an engine has the weights that it had before.
    """
    folder = find_run(run)
    for process in _processes(folder, service):
        asyncio.run(restarted(folder, process))
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


async def restarted(run: RunFolder, process: str) -> None:
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
            await asyncio.sleep(_RESTART_POLL_SECONDS)

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
        await asyncio.sleep(_RESTART_POLL_SECONDS)
    while version is not None and ((served := await _served_version(entry)) is None or served < version):
        await asyncio.sleep(_RESTART_POLL_SECONDS)


async def _served_version(entry: ServiceEntry) -> int | None:
    """The policy version of a rollout service's ready engines; None where it has none, or does not answer."""
    async with RolloutClient(entry.address) as client:
        try:
            fleet = await client.get_fleet(deadline_seconds=_FLEET_SECONDS)
        except HeadraceError:
            return None
    ready = [engine for engine in fleet.engines if engine.state == rollout_pb2.ENGINE_STATE_READY]
    return fleet.policy_version if ready else None


@click.group(cls=Group)
def rollout() -> None:
    """Changes the number of engines of a live run."""


@rollout.command()
@click.argument("num_engines", metavar="N", type=COUNT)
@run_argument
@rollout_address_option
@click.option(
    "--drain-seconds",
    type=Finite(MAX_DRAIN_SECONDS),
    help="How long the requests of an engine that leaves may take to finish; then they are continued elsewhere from "
    "their tokens (default: 30).",
)
@click.option("--no-wait", is_flag=True, help="Ask, and do not wait until the engines serve.")
@click.option(
    "--wait-seconds", type=Finite(MAX_DRAIN_SECONDS), default=900.0, help="Wait no longer than this (default: 900)."
)
def scale(
    num_engines: int,
    run: str | None,
    rollout_address: str | None,
    drain_seconds: float | None,
    no_wait: bool,
    wait_seconds: float,
) -> int:
    """Changes the number of engines of a live run to N, and shows how they come and go.

    The exit code is 0 once the fleet has the wanted size, 1 when an engine stays down or it takes too long.
    """
    address = address_of(run, "rollout", rollout_address)
    return asyncio.run(_scale(address, num_engines, drain_seconds, None if no_wait else wait_seconds))


async def _scale(address: str, num_engines: int, drain_seconds: float | None, wait_seconds: float | None) -> int:
    async with RolloutClient(address) as client:
        fleet = await client.get_fleet()
        reply = await client.scale_fleet(num_engines, drain_seconds=drain_seconds)
        print(_change(reply), flush=True)
        if wait_seconds is None:
            return 0
        return await _watch(client, num_engines, wait_seconds, Coming(fleet.engines))


async def _watch(client: RolloutClient, num_engines: int, wait_seconds: float, coming: Coming) -> int:
    began = time.monotonic()
    while True:
        fleet, passed = await client.get_fleet(), time.monotonic() - began
        for line in coming.news(fleet.engines):
            print(f"{passed:5.0f} s  {line}", flush=True)
        if fleet.wanted_engines != num_engines:
            print(f"somebody asked for {fleet.wanted_engines} engines meanwhile: see `headrace status`")
            return 1
        if len(fleet.engines) == num_engines and (end := coming.end(fleet.engines)) is not None:
            sentence, code = end
            print(sentence)
            return code
        if passed > wait_seconds:
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


@click.command()
@run_argument
@rollout_address_option
@click.option("--agent-function-path", help="pkg.mod.fn or file.py:fn here (default: the one the job names).")
@click.option("--agent-command", help='A command line that plays a task, in place of a function: "codex exec …".')
@click.option("--agent-reward-command", help="A command line whose last line, or exit code, is the reward.")
@click.option("--concurrency", type=COUNT, default=64, help="Tasks played at once.", show_default=True)
@click.option("--workers", type=COUNT, default=2, help="Processes that play them.", show_default=True)
def agent(
    run: str | None,
    rollout_address: str | None,
    agent_function_path: str | None,
    agent_command: str | None,
    agent_reward_command: str | None,
    concurrency: int,
    workers: int,
) -> int:
    """Plays tasks of a job with --agent-hosts here, and tells its rollout service what came of them.

    It plays until a signal, after which its tasks go to other hosts, or until the rollout service has ended. It fails
    when the rollout service is away for five minutes without having said that it ends.
    """
    configure_logging("agent")
    if folder := tls_of():
        trust_authority(folder)  # the URL that agents are given is https
    path, commands = of_commands(agent_function_path, agent_command, agent_reward_command)
    address = address_of(run, "rollout", rollout_address)
    is_over = _is_over(None if rollout_address else find_run(run))
    asyncio.run(_play(address, path, commands, concurrency, min(workers, concurrency), is_over))
    return 0


def _is_over(run: RunFolder | None) -> Callable[[], bool]:
    """A run of this machine is over when none of its services is kept alive; of another one nothing is known."""
    if run is None or not run.running_services():
        return lambda: False
    return lambda: not run.running_services()


async def _play(
    address: str,
    function_path: str | None,
    commands: Mapping[str, str | None],
    concurrency: int,
    workers: int,
    is_over: Callable[[], bool],
) -> None:
    loop, playing = asyncio.get_running_loop(), asyncio.current_task()
    assert playing is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, playing.cancel)
    async with RolloutClient(address) as client:
        host = AgentHost(
            client,
            function_path,
            options=commands,
            concurrency=concurrency,
            workers=workers,
            patience_seconds=_AGENT_PATIENCE_SECONDS,
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
