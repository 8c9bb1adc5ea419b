"""`headrace status [RUN]`: the services of a run, its trainer, its engines, its ledger."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.runs import add_run_argument, find_run
from headrace.cli.view.lines import duration, failures_line, print_no_wrap
from headrace.cli.view.run_view import WARNING_CHARACTERS
from headrace.cli.view.stalls import overdue
from headrace.client.open import open_buffer, open_rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import DataLoss, DeadlineExceeded, HeadraceError
from headrace.launch.health import is_serving
from headrace.launch.previous_run import has_ended, previous_run
from headrace.limits import one_line
from headrace.process.exit_status import ExitStatus
from headrace.process.log_file import doing
from headrace.run_folder import BUFFER, RunFolder, ServiceEntry, service_of

_PATIENCE_SECONDS = 3.0
_MAX_DAMAGES_SHOWN = 20
_SILENT = "does not answer"


def status(argv: Sequence[str]) -> int:
    """Returns 0 when every service serves or the run has finished, else 1."""
    parser = argparse.ArgumentParser(prog="headrace status")
    add_run_argument(parser)
    folder = find_run(parser.parse_intermixed_args(argv).run)
    return _ended(folder) if has_ended(folder) else asyncio.run(_status(folder))


def _ended(folder: RunFolder) -> int:
    """Returns 0 for a run that has finished, and 1 for one that the same command would continue."""
    earlier = previous_run(folder)
    if earlier is None:
        print(f"{folder.path}: ended; its job.json cannot be read, so its progress is unknown")
        return 1
    steps, wanted = earlier.saved_step, earlier.job.rollout.num_rollout
    if steps >= wanted:
        print(
            f"{folder.path}: finished {wanted} of {wanted} steps; `headrace samples` and `headrace export` can read it"
        )
        return 0
    if ending := ExitStatus.read(folder.exit_status):
        print(f"{folder.path}: the trainer ended: {ending.message}")
    print(
        f"{folder.path}: ended; its checkpoints hold {steps} of {wanted} steps: the command that started it continues "
        f"from there; the logs in {folder.logs} say why it ended"
    )
    return 1


async def _status(folder: RunFolder) -> int:
    table = Table("service", "address", "process", "state", title=str(folder.path), title_justify="left", box=None)
    services = folder.services()
    said = await asyncio.gather(*(_said(name, entry.address) for name, entry in services.items()))
    for name, (_, detail) in zip(services, said, strict=True):
        if detail == _SILENT and name in folder.running_services():
            detail = _not_ready(folder, name)
        table.add_row(name, *_where(name, services), Text(detail))
    print_no_wrap(Console(), table)
    if sentence := await overdue(folder, _PATIENCE_SECONDS):
        print(sentence)
    return 0 if all(serving for serving, _ in said) else 1


def _where(name: str, services: Mapping[str, ServiceEntry]) -> tuple[str, str]:
    """(address, process); those of a service of several processes are in the rows of these."""
    processes = [each for each in services if each != name and service_of(each) == name]
    if processes:
        return f"{len(processes)} {'shards' if name == BUFFER else 'services'}", "–"
    return services[name].address, str(services[name].pid or "elsewhere")


def _not_ready(folder: RunFolder, name: str) -> str:
    last = doing(folder.logs / f"{name}.log", 0)
    return "its process runs and does not serve yet" + (f", last: {last}" if last else "")


async def _said(name: str, address: str) -> tuple[bool, str]:
    """(serves, its state in words): a service that waits for its database does not serve and says so."""
    serving = all(await asyncio.gather(*map(is_serving, address.split(","))))
    try:
        if service_of(name) in _DETAILS:
            return serving, await _DETAILS[service_of(name)](address)
    except DeadlineExceeded:
        return serving, _SILENT
    except HeadraceError as error:
        return serving, error.message
    return serving, "serving" if serving else _SILENT


async def _trainer(address: str) -> str:
    async with TrainerClient(address, deadline_seconds=_PATIENCE_SECONDS) as trainer:
        said = await trainer.status()
    phase = trainer_pb2.Phase.Name(said.phase).removeprefix("PHASE_").lower()
    if said.phase == trainer_pb2.PHASE_WAITING:
        phase = f"waiting for {duration(said.waiting_seconds)}, {said.groups_ready}/{said.groups_per_step} groups ready"
    is_beside = said.HasField("evaluating_step") and said.phase != trainer_pb2.PHASE_EVALUATING
    beside = f", the evaluation of step {said.evaluating_step} runs" if is_beside else ""
    ranks = f"{said.world_size} rank{'s' if said.world_size > 1 else ''}"
    return f"step {said.step}/{said.num_steps} {phase}{beside}, policy version {said.policy_version}, {ranks}"


async def _rollout(address: str) -> str:
    async with open_rollout(address, deadline_seconds=_PATIENCE_SECONDS) as rollout:
        fleet = await rollout.get_fleet()
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


async def _buffer(address: str) -> str:
    async with open_buffer(address, deadline_seconds=_PATIENCE_SECONDS) as buffer:
        damaged = "".join(f"\ndamaged: {_described(one)}" for one in (await buffer.damage())[:_MAX_DAMAGES_SHOWN])
        try:
            stats = await buffer.stats("train")
        except DataLoss as error:
            return f"{error.message}{damaged}"
    groups = ", ".join(f"{count} {name.lower()}" for name, count in sorted(stats.groups.items()) if count)
    mix = "".join(
        f"\n{source.name} (weight {source.weight:g}): {source.prompts_read} prompts read, {source.ready} groups ready, "
        f"{source.batched} in batches"
        for source in stats.sources
    )
    trouble = f"; no prompts: {stats.trouble}" if stats.trouble else ""
    failures = f"\n{line}" if (line := failures_line(stats.production)) else ""
    state = f"step {stats.step} (committed {stats.committed_step}); groups: {groups or 'none'}"
    return f"{state}{mix}{trouble}{failures}{damaged}"


def _described(damage: buffer_pb2.Damage) -> str:
    whose = [f"{name} {value}" for name, value in (("group", damage.group_id), ("sample", damage.sample_id)) if value]
    return f"{damage.what} ({', '.join(whose)})" if whose else damage.what


_DETAILS: Mapping[str, Callable[[str], Awaitable[str]]] = {"trainer": _trainer, "rollout": _rollout, "buffer": _buffer}
