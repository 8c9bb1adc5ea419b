"""`headrace samples [RUN]`: what the policy generated, while the run lives and after it has ended."""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from headrace.api.buffer.v1 import buffer_pb2
from headrace.cli.arg_types import COUNT, COUNT_FROM_ZERO, TEXT, buffer_address_option, run_argument, stream_option
from headrace.cli.runs import find_run, require_answer
from headrace.cli.view.lines import printable
from headrace.client.open import Buffer, open_buffer
from headrace.errors import NotFound, Unavailable
from headrace.inspect_logs import require_inspect, write_logs, write_page
from headrace.launch.buffer_of_run import living_buffer
from headrace.run_folder import RunFolder
from headrace.sample_log import Answer, SampleLog, as_row
from headrace.trajectory import Sample

_WITH_PAYLOAD = (buffer_pb2.GROUP_STATE_READY, buffer_pb2.GROUP_STATE_CONSUMED)
_MAX_LEDGER_GROUPS = 200
_SAMPLES_AT_ONCE = 64
_SHOWN = 5
_ONE_TURN = 2
"""The messages of a conversation of one turn."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What was asked for; None: any."""

    n: int
    step: int | None
    eval: str | None
    """A data set; empty: of all."""
    group: str | None
    search: str | None
    best: bool
    worst: bool
    failed: bool
    stream: str
    buffer_address: str | None


@click.command()
@run_argument
@click.option("-n", type=COUNT, help="How many samples to show at most (5), or to export (all).")
@click.option(
    "--step", type=COUNT_FROM_ZERO, help="Only samples that this step trained, counted from 1 as on the console."
)
@click.option(
    "--eval",
    is_flag=False,
    flag_value="",
    type=TEXT,
    metavar="[NAME]",
    help="Only samples of evaluations, of this data set or of all; --step then is the step evaluated after.",
)
@click.option("--group", type=TEXT, help="Only samples of the group with this id.")
@click.option("--search", type=TEXT, help="Only samples with TEXT in prompt or response.")
@click.option("--best", is_flag=True, help="Highest reward first.")
@click.option("--worst", is_flag=True, help="Lowest reward first.")
@click.option("--failed", is_flag=True, help="Only samples that failed, with the reason.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--to",
    type=(click.Choice(["inspect"]), click.Path(file_okay=False, path_type=Path)),
    metavar="inspect FOLDER",
    help="Write logs of Inspect into FOLDER, one for each step: `inspect view` opens them.",
)
@click.option(
    "--html",
    type=click.Path(exists=False, path_type=Path),
    metavar="FOLDER",
    help="Write Inspect's page with the samples into a new FOLDER, for any web server.",
)
@stream_option
@buffer_address_option
def samples(
    run: str | None, n: int | None, as_json: bool, to: tuple[str, Path] | None, html: Path | None, **asked: Any
) -> int:
    """Prints what the policy generated, newest step first, while the run lives and after it has ended.

    Samples are read from samples/ in the run's folder, where the trainer writes them step by step, and while the run
    lives also from its ledger, where they wait to be trained. --sample-log-bytes bounds the folder.
    """
    args = _Wanted(n=n or _SHOWN, **asked)
    if args.best and args.worst:
        raise click.UsageError("--best and --worst are two orders: name only one")
    if to or html:
        if as_json:
            raise click.UsageError("--json prints samples, --to and --html write files: name only one")
        return _export(run, args, n, to[1] if to else None, html)
    folder = None if args.buffer_address else find_run(run)
    found = list(_chosen(_all(folder, args), args, args.n))
    if as_json:
        for answer in found:
            print(json.dumps(as_row(answer), ensure_ascii=False))
        return 0
    console = Console()
    for answer in found:
        console.print(described(answer), highlight=False, soft_wrap=True)
    for line in _notes(folder, found, args):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _all(folder: RunFolder | None, args: _Wanted) -> Iterator[Answer]:
    """Each sample once, newest first: those that wait in the ledger, then step by step what was trained."""
    seen = set[str]()
    for answer in _by_source(folder, args):
        if answer.sample_id not in seen:
            seen.add(answer.sample_id)
            yield answer


def _by_source(folder: RunFolder | None, args: _Wanted) -> Iterator[Answer]:
    log = SampleLog(folder.samples) if folder else None
    if log and (args.eval is not None or args.step in log.steps()):
        yield from _evaluated_or_trained(log, args)
        return
    if log and args.failed:
        yield from log.failed()
    address = args.buffer_address or (living_buffer(folder) if folder else None)
    if address:
        yield from _held(address, args, required=log is None or log.is_empty())
    if log:
        yield from _evaluated_or_trained(log, args)
        yield from log.untrained() if args.group or args.search else ()


def _evaluated_or_trained(log: SampleLog, args: _Wanted) -> Iterator[Answer]:
    """The samples of each step in the run's folder, newest first."""
    steps, of_step = (log.steps(), log.of_step) if args.eval is None else (log.evaluations(), log.of_evaluation)
    for step in reversed(steps):
        if args.step in (None, step):
            yield from of_step(step)


def _held(address: str, args: _Wanted, *, required: bool) -> list[Answer]:
    try:
        return asyncio.run(_of_ledger(address, args))
    except Unavailable as error:
        if required:
            raise
        print(
            f"headrace: the ledger cannot be read, so only samples in the run's folder are shown: {error.message}",
            file=sys.stderr,
        )
        return []


async def _of_ledger(address: str, args: _Wanted) -> list[Answer]:
    """Reads the groups that changed last, and stops when they are enough for the question."""
    await require_answer(address, "buffer")
    narrow = args.best or args.worst or args.search or args.step is not None or args.failed
    found: list[Answer] = []
    async with open_buffer(address) as buffer:
        groups: Sequence[buffer_pb2.Group]
        if args.group:
            groups = (await buffer.list_groups(args.stream, _WITH_PAYLOAD, group_ids=[args.group])).groups
        else:
            num_groups = _MAX_LEDGER_GROUPS if narrow else min(args.n, _MAX_LEDGER_GROUPS)
            groups = await _newest(address, args.stream, num_groups)
        for group in groups:
            found += await _of_group(buffer, args.stream, group)
            if not narrow and len(found) >= args.n:
                break
    return found


async def _newest(address: str, stream: str, num_groups: int) -> Sequence[buffer_pb2.Group]:
    """The newest groups of every shard, one of each in turn: shards have no common order of changes."""
    pages = []
    for shard in address.split(","):
        async with open_buffer(shard) as buffer:
            pages.append((await buffer.list_groups(stream, _WITH_PAYLOAD, page_size=num_groups)).groups)
    return [group for turn in zip_longest(*pages) for group in turn if group is not None][:num_groups]


async def _of_group(buffer: Buffer, stream: str, group: buffer_pb2.Group) -> list[Answer]:
    """The group's samples; empty when it was committed meanwhile."""
    step = group.step + 1 if group.HasField("step") else None
    ids = [envelope.sample_id for envelope in group.samples]
    found: list[Answer] = []
    try:
        for start in range(0, len(ids), _SAMPLES_AT_ONCE):
            packed = await buffer.fetch_samples(stream, ids[start : start + _SAMPLES_AT_ONCE])
            found += [Answer.of(Sample.unpack(one), step) for one in packed]
    except NotFound:
        return []
    return found


def _chosen(answers: Iterator[Answer], args: _Wanted, n: int | None) -> Iterable[Answer]:
    wanted = (answer for answer in answers if _is_wanted(answer, args))
    if n is not None and (args.best or args.worst):
        scored = (answer for answer in wanted if answer.reward is not None)
        chosen = heapq.nlargest if args.best else heapq.nsmallest
        return chosen(n, scored, key=lambda answer: answer.reward or 0.0)
    return islice(wanted, n)


def _is_wanted(answer: Answer, args: _Wanted) -> bool:
    if args.failed and answer.failure_reason is None:
        return False
    if args.step is not None and answer.step != args.step:
        return False
    if args.eval and not answer.group_id.startswith(f"eval/{args.eval}/"):
        return False
    if args.group is not None and answer.group_id != args.group:
        return False
    needle = (args.search or "").casefold()
    texts = (answer.prompt, answer.response, *(turn["content"] for turn in answer.turns))
    return any(needle in text.casefold() for text in texts)


def _export(run: str | None, args: _Wanted, n: int | None, logs: Path | None, html: Path | None) -> int:
    """Writes samples of the run's folder; those that wait in the ledger have no step yet."""
    if args.buffer_address:
        raise click.UsageError("--to and --html read a run's folder: leave --buffer-address out")
    if (args.best or args.worst) and n is None:
        raise click.UsageError("--best and --worst choose samples for a log: say how many with -n")
    if html is not None and html.exists():
        raise click.UsageError(f"--html {html} exists: name a new folder")
    require_inspect()
    folder = find_run(run)
    log = SampleLog(folder.samples)
    # A step's samples come together, so one log at a time is in memory.
    chosen = _chosen(chain(_evaluated_or_trained(log, args), log.untrained() if args.eval is None else ()), args, n)
    if args.best or args.worst:
        chosen = sorted(chosen, key=lambda answer: -1 if answer.step is None else answer.step)
    with TemporaryDirectory() as scratch:
        target = logs or Path(scratch)
        files = list(write_logs(chosen, folder.path.name, target, evaluated=args.eval is not None))
        if not files:
            for line in _notes(folder, [], args):
                print(line)
            return 0
        if html is not None:
            write_page(target, html)
    if logs is not None:
        print(f"{len(files)} logs in {logs}: inspect view --log-dir {logs}")
    if html is not None:
        print(f"the page is {html}: python -m http.server -d {html}")
    return 0


def _notes(folder: RunFolder | None, found: Sequence[Answer], args: _Wanted) -> Iterator[str]:
    """Lines that say what else there is, or why nothing was found."""
    if folder is None:
        if not found:
            yield "the ledger holds no such sample; committed samples are in their run's folder: headrace samples RUN"
        return
    log = SampleLog(folder.samples)
    steps = log.steps() if args.eval is None else log.evaluations()
    if not found:
        nothing = "no step was trained yet" if args.eval is None else "no evaluation has samples yet"
        there = f"steps {steps[0]} to {steps[-1]} have samples" if steps else nothing
        yield f"no such sample in {folder.path}: {there}"
    if not args.failed and (failed := sum(1 for _ in log.failed())):
        yield f"{failed} samples failed: `headrace samples {folder.path} --failed` shows them"


def described(answer: Answer) -> str:
    """A sample for a person, in rich's markup."""
    versions = ", ".join(f"{version} [{start}:{end}]" for version, start, end in answer.policy_ranges)
    if answer.failure_reason is not None:
        scored = f"[red]failed[/]: {_shown(answer.failure_reason)}: {_shown(answer.failure_message or '')}"
    elif answer.reward is None:
        scored = "not scored"
    else:
        dropped = f", dropped by the filter: {_shown(answer.dropped_reason)}" if answer.dropped_reason else ""
        parts = "".join(f", {_shown(name)} {value:.3g}" for name, value in sorted(answer.reward_parts.items()))
        by = f"{_shown(answer.scorer)} {_shown(answer.scorer_version)}".strip() or "its producer"
        scored = f"reward [bold]{answer.reward:.3g}[/] by {by}{parts}{dropped}"
    label = f", label {_shown(answer.label)}" if answer.label is not None else ""
    step = f"step {answer.step}, " if answer.step is not None else ""
    return (
        f"[dim]── {step}{_shown(answer.sample_id)}, {answer.status}, {answer.prompt_tokens} + {answer.response_tokens} "
        f"tokens, policy version {versions or '–'}[/]\n"
        f"{_conversation(answer)}{scored}{label}\n"
    )


def _conversation(answer: Answer) -> str:
    """Each turn below its role. Of one turn: the prompt as the policy read it, and the response."""
    turns = [(turn["role"] or "?", turn["content"]) for turn in answer.turns]
    shown = turns if len(turns) > _ONE_TURN else [("prompt", answer.prompt), ("response", answer.response)]
    lines = []
    for role, said in shown:
        color = "cyan" if role in ("assistant", "response") else "default"
        lines.append(f"[bold]{_shown(role)}:[/]\n[{color}]{_shown(said)}[/]\n")
    return "".join(lines)


def _shown(text: str) -> str:
    return escape(printable(text))
