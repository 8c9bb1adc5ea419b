"""`headrace reward`: which scorer pays for the samples of a live run, which one is tried; a service by itself."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.cli.arg_types import COUNT, COUNT_FROM_ZERO, PATH, Finite, Group, json_option, print_json, run_argument
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import print_no_wrap
from headrace.client.reward import RewardClient
from headrace.disk import write_new
from headrace.errors import ConfigError, FailedPrecondition, NotFound
from headrace.hooks import hook_args
from headrace.hooks.trial.check import check_hook
from headrace.job.load.resolve import resolve
from headrace.job.schema.job import Job
from headrace.limits import object_of_line
from headrace.process.child import run_once
from headrace.rpc.log import drop_logs
from headrace.run_folder import RunFolder
from headrace.shadow_log import Comparison, Difference, ShadowLog, of_line

_CHANGE_SECONDS = 180.0
_ANSWER_SECONDS = 30.0
_SHARE = Finite(1.0, above_zero=True)
_FURTHEST = 5


@click.group(cls=Group)
def reward() -> None:
    """Changes which scorer pays for the samples of a live run, and tries another one beside it."""


def _address_option(function: Callable[..., int]) -> Callable[..., int]:
    option = click.option("--reward-address", help="host:port of the reward service, instead of a run")
    return option(function)


@reward.command("set")
@click.argument("scorer")
@run_argument
@_address_option
def set_(scorer: str, run: str | None, reward_address: str | None) -> int:
    """Scores with SCORER from the next group on.

    SCORER is the name of a built-in scorer, a function (file.py:fn or pkg.mod.fn), a file.toml with reward_parts, or
    grpc://HOST:PORT[/SCORER]. A function is tried first, as `headrace check hook` does. Nothing restarts, and every
    sample names its scorer.
    """
    name = _tried(scorer, run, reward_address)
    return _change(run, reward_address, pb.ChangeScorerRequest(set=name))


@reward.command()
@click.argument("scorer", required=False)
@run_argument
@_address_option
@click.option("--share", type=_SHARE, default=1.0, show_default=True, help="Share of the groups that it scores, too.")
def shadow(scorer: str | None, run: str | None, reward_address: str | None, share: float) -> int:
    """Has SCORER score live samples beside the scorer that pays. Nothing trains on its scores.

    `headrace reward diff` compares the two. Without SCORER the present candidate is taken.
    """
    name = _tried(scorer, run, reward_address) if scorer else ""
    return _change(run, reward_address, pb.ChangeScorerRequest(shadow=pb.Trial(scorer=name, share=share)))


@reward.command()
@click.argument("scorer", required=False)
@run_argument
@_address_option
@click.option("--share", type=_SHARE, default=0.1, show_default=True, help="Share of the groups that it pays for.")
def canary(scorer: str | None, run: str | None, reward_address: str | None, share: float) -> int:
    """Has SCORER pay for a share of the groups. Without SCORER the present candidate is taken."""
    name = _tried(scorer, run, reward_address) if scorer else ""
    return _change(run, reward_address, pb.ChangeScorerRequest(canary=pb.Trial(scorer=name, share=share)))


@reward.command()
@run_argument
@_address_option
def promote(run: str | None, reward_address: str | None) -> int:
    """Has the candidate pay for every group from the next one on."""
    return _change(run, reward_address, pb.ChangeScorerRequest(promote=pb.Promote()))


@reward.command()
@run_argument
@_address_option
def rollback(run: str | None, reward_address: str | None) -> int:
    """Has the scorer that paid before pay again, and tries no candidate any more."""
    return _change(run, reward_address, pb.ChangeScorerRequest(rollback=pb.Rollback()))


@reward.command()
@run_argument
@_address_option
def stop(run: str | None, reward_address: str | None) -> int:
    """Tries no candidate any more. The scorer that pays stays."""
    return _change(run, reward_address, pb.ChangeScorerRequest(stop=pb.Stop()))


@reward.command()
@run_argument
@_address_option
@json_option
def status(run: str | None, reward_address: str | None, as_json: bool) -> int:
    """Shows which scorer pays, which one is tried, and which ones paid before."""
    drop_logs()
    state = asyncio.run(_asked(address_of(run, "reward", reward_address), None))
    if as_json:
        print_json(state)
    else:
        _print_state(state)
    return 0


@reward.command()
@run_argument
@json_option
@click.option(
    "-n", type=COUNT_FROM_ZERO, default=_FURTHEST, show_default=True, help="How many of the samples that differ most."
)
def diff(run: str | None, as_json: bool, n: int) -> int:
    """Compares the shadow with the scorer that pays, on the samples that both have scored.

    It reads shadow.jsonl of the run's folder, also after the run has ended.
    """
    pair = ShadowLog(find_run(run).shadow).latest_pair()
    _print_difference(pair, n, as_json=as_json)
    return 0


@reward.command()
@click.argument("scorer")
@run_argument
@json_option
@click.option("--step", type=COUNT, help="Only samples that this step trained, counted from 1 as on the console.")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the rewards, one line a sample.",
)
@click.option(
    "-n", type=COUNT_FROM_ZERO, default=_FURTHEST, show_default=True, help="How many of the samples that differ most."
)
def rescore(scorer: str, run: str | None, as_json: bool, step: int | None, to: Path | None, n: int) -> int:
    """Scores the stored samples of a run with SCORER, and compares the rewards with those that were paid.

    The run may have ended. SCORER sees the samples' texts and metadata, without their tokens.
    """
    drop_logs()
    folder = find_run(run)
    lines, failed = asyncio.run(_rescored(folder, _absolute(scorer), step))
    if to is not None:
        to.write_bytes(b"".join(line + b"\n" for line in lines))
    compared = [found for found in map(of_line, lines) if found is not None]
    if not compared:
        raise NotFound(f"{folder.path} has no sample that {scorer} could score{f': {failed[0]}' if failed else ''}")
    _print_difference(compared, n, as_json=as_json, names=("paid", "now"))
    if failed and not as_json:
        print(f"{len(failed)} samples were not scored: {failed[0]}")
    return 0


async def _rescored(folder: RunFolder, scorer: str, step: int | None) -> tuple[list[bytes], list[str]]:
    """The lines of the program that scores, and why some samples were not scored."""
    program = [*folder.job().services.python_of("reward"), "-m", "services.reward.rescore"]
    words = ["--run", str(folder.path.absolute()), "--scorer", scorer]
    words += [] if step is None else ["--step", str(step)]
    done = await run_once([*program, *words], os.environ)
    if done.exit_code:
        raise FailedPrecondition(done.last_lines[-1] if done.last_lines else "the scoring ended without a message")
    lines = done.out.splitlines()
    errors = [fields for line in lines if of_line(line) is None and (fields := object_of_line(line))]
    return lines, [f"{each['reason']}: {each['message']}" for each in errors]


def _change(run: str | None, reward_address: str | None, request: pb.ChangeScorerRequest) -> int:
    drop_logs()
    _print_state(asyncio.run(_asked(address_of(run, "reward", reward_address), request)))
    return 0


async def _asked(address: str, request: pb.ChangeScorerRequest | None) -> pb.ScorerState:
    async with RewardClient(address) as client:
        if request is None:
            return await client.scorer_state(deadline_seconds=_ANSWER_SECONDS)
        return await client.change_scorer(request, deadline_seconds=_CHANGE_SECONDS)


def _tried(scorer: str, run: str | None, reward_address: str | None) -> str:
    """The scorer's name for the service. Raises ConfigError for a function that is no reward, or fails on samples."""
    if "." not in scorer or "://" in scorer:
        return scorer
    path = _absolute(scorer)
    if path.endswith(".toml"):
        return path
    if reward_address is None and find_run(run).running_services():
        drop_logs()
        _try(find_run(run).job(), path)
    return path


def _try(job: Job, path: str) -> None:
    report = check_hook(path, None, hook_args(resolve(job)))
    if report.failed:
        raise ConfigError("; ".join(report.failed))
    if report.kind not in ("reward", "group_reward"):
        raise ConfigError(f"{path} is a {report.kind} hook: name a function (args, sample) or (args, samples)")


def _absolute(path: str) -> str:
    """A file's name from here, because the service may have been started in another folder."""
    file, colon, function = path.rpartition(":")
    if path.endswith(".toml"):
        return str(Path(path).absolute())
    return f"{Path(file).absolute()}{colon}{function}" if colon and Path(file).is_file() else path


def _print_state(state: pb.ScorerState) -> None:
    lines = [("pays", _shown(state.live))]
    if state.HasField("candidate"):
        name = "canary" if state.candidate_pays else "shadow"
        lines.append((name, f"{_shown(state.candidate)}, {state.share:.0%} of the groups"))
    if (counts := state.shadow).compared or counts.failed or counts.dropped:
        behind = f", {counts.dropped} dropped because it was behind" if counts.dropped else ""
        failed = f", {counts.failed} failed" if counts.failed else ""
        equal = f"{counts.compared} samples, {counts.equal} with the same reward"
        lines.append(("compared", f"{equal}{failed}{behind}"))
    lines += [("before", _shown(former)) for former in reversed(state.former)]
    for name, text in lines:
        print(f"{name:<10}{_from_here(text)}")


def _from_here(text: str) -> str:
    """Names files below this folder from here."""
    return text.replace(f"{Path.cwd()}/", "")


def _shown(scorer: pb.ScorerVersion) -> str:
    name = scorer.scorer or "the job's own"
    if not scorer.version:
        return name
    return (
        scorer.version if scorer.scorer and scorer.version.startswith(scorer.scorer) else f"{name} ({scorer.version})"
    )


def _print_difference(
    pair: Sequence[Comparison], num_furthest: int, *, as_json: bool, names: tuple[str, str] = ("pays", "shadow")
) -> None:
    found = Difference.of(pair, num_furthest)
    if as_json:
        print_json(found)
        return
    paid = sorted({f"{each.live} {each.live_version}" for each in pair})
    print(f"{names[0]:<8}{_from_here(', '.join(paid))}")
    print(f"{names[1]:<8}{_from_here(f'{pair[0].shadow} {pair[0].shadow_version}')}\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    rows: Sequence[tuple[str, Any]] = (
        ("samples", found.samples),
        ("same reward", f"{found.equal} ({found.equal / found.samples:.0%})"),
        ("mean reward", f"{found.live_mean:.3f} and {found.shadow_mean:.3f}"),
        ("correlation", f"Pearson {_number(found.pearson)}, Spearman {_number(found.spearman)}"),
    )
    for name, value in rows:
        table.add_row(name, str(value))
    console = Console(highlight=False)
    print_no_wrap(console, table)
    table = Table(
        "\nresponse tokens", "\nsamples", *(f"\n{name}" for name in names), "\ndifference", box=None, pad_edge=False
    )
    for quarter in found.by_length:
        span = f"{quarter.shortest} to {quarter.longest}"
        means = (quarter.live_mean, quarter.shadow_mean)
        table.add_row(span, str(quarter.samples), *(f"{mean:.3f}" for mean in means), f"{quarter.difference:+.3f}")
    print_no_wrap(console, table)
    if found.furthest:
        table = Table("\ndiffer most", *(f"\n{name}" for name in names), "\ngroup", box=None, pad_edge=False)
        for each in found.furthest:
            rewards = (f"{each.live_reward:g}", f"{each.shadow_reward:g}")
            table.add_row(Text(each.sample_id), *rewards, Text(each.group_id))
        print_no_wrap(console, table)
        print(f"\nread one: headrace samples --group {found.furthest[0].group_id}")


def _number(value: float | None) -> str:
    return "– (one of them always gives the same)" if value is None else f"{value:.2f}"


# A reward service by itself, without a job.


ADDRESS = "127.0.0.1:7010"


@reward.command(context_settings={"ignore_unknown_options": True})
@click.argument("scorer")
@click.option("--address", default=ADDRESS, show_default=True, help="host:port to listen on.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
def serve(scorer: str, address: str, words: Sequence[str]) -> int:
    """Serves SCORER until Ctrl-C: a function (file.py:fn, pkg.mod.fn), or one of headrace's own (math, judge, …).

    Further flags are those of a job's [reward] section, and --tls-dir, --tokens-file, --insecure.
    """
    is_function = ":" in scorer or "." in scorer
    named = ["--custom-rm-path" if is_function else "--rm-type", scorer]
    os.execv(sys.executable, [sys.executable, "-m", "services.reward", "--address", address, *named, *words])


@reward.command()
@click.argument("folder", type=PATH)
def new(folder: Path) -> int:
    """Writes a reward service into FOLDER, to be changed: the function, its tests, a Containerfile."""
    template = files("headrace.templates").joinpath("reward")
    written = write_new(folder, {file.name: file.read_text() for file in template.iterdir() if file.is_file()})
    print(f"{folder}: {', '.join(written)}")
    print(f"next: cd {folder} && python -m pytest")
    print(f"      headrace reward serve reward.py:reward --address {ADDRESS}")
    return 0
