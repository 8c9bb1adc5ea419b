"""Steps, evaluations, engines, failures and two runs side by side, as lines and tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2
from headrace.limits import one_line
from headrace.run_folder import fields_in
from headrace.trajectory import FILTERED

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Replaces control characters of untrusted text by pictures, so that they cannot steer the terminal."""
    return text.translate(_CONTROLS)


_MAX_CHARACTERS = 100_000  # of a line; rich lays a table out for a width, and needs one


def print_no_wrap(console: Console, what: RenderableType) -> None:
    """Prints to a terminal as it is; elsewhere a path or a sentence stays on one line, where grep finds it."""
    if console.is_terminal:
        console.print(what)
        return
    wide = Console(file=StringIO(), width=_MAX_CHARACTERS)
    with wide.capture() as captured:
        wide.print(what)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


_PARTS: Mapping[str, tuple[str, str]] = {
    "reward/all/mean": ("reward", ".3f"),
    "reward/mean": ("of trained", ".3f"),
    "loss/sft": ("loss", ".4f"),
    "critic/loss": ("critic's loss", ".4f"),
    "loss/kl": ("KL to the start", ".4f"),
    "entropy": ("entropy", ".3f"),
    "grad_norm": ("gradient norm", ".3g"),
    "response_length/mean": ("tokens a response", ".1f"),
    "spec_accept_length": ("tokens a verification of drafts", ".2f"),
    "tokens_per_second": ("tokens/s", ".0f"),
    "time/step_seconds": ("seconds", ".1f"),
}
"""What a person looks at, in this order: its label and format.

The first reward is the mean of all scored groups. Only it shows what the policy can do: filters choose what is
trained.
Not `loss/policy`: on fresh samples its value is 0 whatever its gradient is, and reads as a failure.
"""

_FILTERED, _PRODUCED, _REASON = "samples/filtered", "samples/produced", "reason/"


def step_line(metrics: Mapping[str, float], skip: Sequence[str] = ()) -> str:
    """Empty when no metric of a step is present."""
    labels = {name: label for name, (label, _) in _PARTS.items()}
    if "reward/all/mean" not in metrics:
        labels["reward/mean"] = "reward"
    wanted = [name for name in _PARTS if name in metrics and name not in skip]
    parts = [f"{labels[name]} {metrics[name]:{_PARTS[name][1]}}" for name in wanted]
    if metrics.get("reward/std") == 0.0 and metrics.get("samples/count", 0.0) > 1:
        parts.append("nothing to learn in this step: all rewards are equal")
    return ", ".join(parts)


def skipped_line(metrics: Mapping[str, float]) -> str:
    """`dynamic sampling skipped 48 of 200 samples: 32 all right, 16 all wrong`; empty where it skipped none."""
    if not metrics.get(_FILTERED):
        return ""
    counts = {
        name.removeprefix(f"{_FILTERED}/"): number
        for name, number in metrics.items()
        if name.startswith(f"{_FILTERED}/") and number
    }
    ranked = sorted(counts, key=lambda kind: (-counts[kind], kind.startswith(_REASON), kind))
    said = ", ".join(f"{counts[kind]:.0f} {_said(kind)}" for kind in ranked)
    return f"dynamic sampling skipped {metrics[_FILTERED]:.0f} of {metrics[_PRODUCED]:.0f} samples: {said}"


def _said(kind: str) -> str:
    reason = kind.removeprefix(_REASON)
    return kind.replace("_", " ") if reason == kind else f'"{reason}"'


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Empty when nothing was evaluated."""
    return ", ".join(f"{name.removeprefix('eval/')} {metrics[name]:.3f}" for name in evaluations(metrics))


def evaluations(metrics: Mapping[str, float]) -> list[str]:
    """The data sets' mean rewards among the metrics: `eval/NAME`."""
    return [name for name in metrics if name.startswith("eval/") and name.count("/") == 1]


def duration(seconds: float) -> str:
    """Formats a duration for a person: 40 s, 6 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 90 else f"{whole // 60} h {whole % 60} min"


def engines_line(engines: Sequence[rollout_pb2.Engine]) -> str:
    """`3/4 engines ready, engine-2 ended too often and stays down: …, engine-4 leaves`."""
    if not engines:
        return "no engines"
    staying = [engine for engine in engines if engine.state != rollout_pb2.ENGINE_STATE_LEAVING]
    leaving = [f", {engine.engine_id} leaves" for engine in engines if engine not in staying]
    ready = sum(engine.state == rollout_pb2.ENGINE_STATE_READY for engine in engines)
    down = [
        f", {engine.engine_id} ended too often and stays down: {one_line(engine.trouble)}"
        for engine in engines
        if engine.state == rollout_pb2.ENGINE_STATE_QUARANTINED
    ]
    return f"{ready}/{len(staying)} engines ready{''.join(down + leaving)}"


_REASONS_SHOWN = 3


def failures_line(production: pb.Production) -> str:
    """Counts and the most frequent reasons on one line; empty where nothing failed, was dropped or came back."""
    parts = []
    if production.num_failed:
        parts.append(f"{production.num_failed} of {production.num_samples} samples failed")
    if production.num_dropped:
        parts.append(f"{production.num_dropped} of {production.num_samples} samples dropped")
    if production.failures:
        shown = [f"{count.num_samples} {_reason(count)}" for count in production.failures[:_REASONS_SHOWN]]
        parts.append(f"most often {'; '.join(shown)}")
    if production.num_groups_returned:
        parts.append(f"{production.num_groups_returned} groups came back, the last: {one_line(production.last_return)}")
    return ", ".join(parts)


class FailureNotes:
    """Notes a reason when it is new, and again whenever its count has doubled."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def lines(self, production: pb.Production) -> list[str]:
        """Returns the lines that are due now."""
        found = []
        for count in production.failures:
            if count.reason == FILTERED:  # no failure: the line of each step says what the filter dropped
                continue
            if count.num_samples < self._told.get(count.reason, 0):
                del self._told[count.reason]  # the buffer started again, and counts from 0
            if count.num_samples >= 2 * self._told.get(count.reason, 0):
                self._told[count.reason] = count.num_samples
                found.append(
                    f"{count.num_samples} of {production.num_samples} samples are not trained, {_reason(count)} "
                    f"(e.g. group {count.group_id})"
                )
        return found


def _reason(count: pb.FailureCount) -> str:
    return f"{one_line(count.reason)}: {one_line(count.example)}"


_MEAN = "eval/"


def history_table(file: Path) -> Table | None:
    """Returns None where no evaluation has ended. Of a step that was evaluated twice, the later row counts."""
    rows = evaluated_rows(file)
    if not rows:
        return None
    names = sorted({name.removeprefix(_MEAN) for row in rows for name in row if name.startswith(_MEAN)})
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(escape(printable(name)))
    table.add_column("versions")
    for row in rows:
        table.add_row(str(row["step"]), *(_mean_cell(row, name) for name in names), _versions(row, names))
        for warning in row.get("warnings", ()):
            table.add_row("", *("" for _ in names), f"[dim]{escape(printable(str(warning)))}[/]")
    return table


def evaluated_rows(file: Path) -> list[Mapping[str, Any]]:
    """A run's metrics of its evaluations, in the order of steps; of a step that was evaluated twice, the later ones."""
    rows = {row["step"]: row for row in fields_in(file) if "eval_error" in row}
    return [rows[step] for step in sorted(rows)]


def _mean_cell(row: Mapping[str, Any], name: str) -> str:
    mean, low, high = (row.get(f"{kind}/{name}") for kind in ("eval", "eval_low", "eval_high"))
    if mean is None:
        return "–"
    interval = f" [dim]\\[{low:.3f}, {high:.3f}][/]" if low is not None and high is not None else ""
    passed = [f" @{k} {share:.3f}" for k, share in _passes(row, name) if k > 1]
    return f"{mean:.3f}{interval}{''.join(passed)}"


def _passes(row: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    prefix = f"eval_pass/{name}@"
    return sorted((int(key.removeprefix(prefix)), share) for key, share in row.items() if key.startswith(prefix))


def _versions(row: Mapping[str, Any], names: Sequence[str]) -> str:
    lows = [row[key] for name in names if (key := f"eval_min_version/{name}") in row]
    highs = [row[key] for name in names if (key := f"eval_max_version/{name}") in row]
    if not lows or not highs:
        return "no result"
    first, last = int(min(lows)), int(max(highs))
    return str(first) if first == last else f"{first} to {last}"


_LOSSES = ("loss/policy", "loss/sft", "loss/custom")
_SHOWN = ("grad_norm", "entropy")
_OF_THE_MACHINE = (
    "time/",
    "busy/",
    "publish/",
    "reward/all/",
    "samples/filtered",
    "samples/produced",
    "eval",
    "tokens_per_second",
    "tflops_per_rank",
    "mfu",
)
"""What depends on more than the samples and the settings."""

Rows = Mapping[int, Mapping[str, float]]


def compared(recorded: Path, replayed: Path, *, after: int) -> Iterator[RenderableType]:
    """A table of the steps that both trained, and a sentence that says whether all their figures are the same."""
    before, now = _steps(recorded), _steps(replayed)
    steps = sorted(step for step in before.keys() & now.keys() if step > after)
    if not steps:
        yield "no step was trained by both runs"
        return
    yield _table(before, now, steps)
    if (first := next(((step, name) for step in steps for name in _different(before[step], now[step])), None)) is None:
        yield f"steps {steps[0]} to {steps[-1]} are the same in every figure, bit for bit"
    else:
        step, name = first
        yield f"they differ from step {step} on: {name} {before[step][name]!r} was {now[step][name]!r} now"


def _table(before: Rows, now: Rows, steps: list[int]) -> Table:
    both = {name for step in steps for name in before[step].keys() & now[step].keys()}
    names = [name for name in (*_LOSSES, *_SHOWN) if name in both]
    table = Table(box=None, pad_edge=False)
    for heading in ("step", *(each for name in names for each in (name, "replayed"))):
        table.add_column(heading, no_wrap=True, justify="right")
    for step in steps:
        cells = [_cell(rows[step].get(name)) for name in names for rows in (before, now)]
        table.add_row(str(step), *cells)
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _different(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """The figures that both have and that depend on the samples alone."""
    for name in before:
        if name in now and not name.startswith(_OF_THE_MACHINE) and before[name] != now[name]:
            yield name


def _steps(file: Path) -> dict[int, Mapping[str, float]]:
    """Rows of steps, not of evaluations."""
    return {row["step"]: _figures(row) for row in fields_in(file) if "grad_norm" in row}


def _figures(row: Mapping[str, Any]) -> Mapping[str, float]:
    return {name: each for name, each in row.items() if name not in ("step", "time") and isinstance(each, float | int)}


_SENTENCES: Mapping[int, str] = {
    rollout_pb2.ENGINE_STATE_STARTING: "starts and loads the model",
    rollout_pb2.ENGINE_STATE_STALE: "has started and waits for weights: the trainer gives it those that are served "
    "when it next waits for a batch, or its next version",
    rollout_pb2.ENGINE_STATE_UPDATING: "is being given weights and serves once they are committed",
    rollout_pb2.ENGINE_STATE_RELEASED: "has given its memory to the trainer, which has the devices now",
    rollout_pb2.ENGINE_STATE_LEAVING: "leaves: what it generates finishes, or is continued by the others",
}


class Coming:
    """Remembers the engines as they were seen last."""

    def __init__(self, engines: Sequence[rollout_pb2.Engine]) -> None:
        self._seen: Mapping[str, int] = {}
        self._seen = self._states(engines)

    def news(self, engines: Sequence[rollout_pb2.Engine]) -> Iterator[str]:
        """Yields a line for each engine that is in another state than before."""
        states = self._states(engines)
        for gone in self._seen.keys() - states.keys():
            yield f"{gone} has ended"
        for engine in engines:
            state = states[engine.engine_id]
            if self._seen.get(engine.engine_id) != state:
                yield f"{engine.engine_id} {_sentence(engine, state)}"
        self._seen = states

    def end(self, engines: Sequence[rollout_pb2.Engine]) -> tuple[str, int] | None:
        """The sentence and the exit code with which the watching ends; None while some still come or go."""
        states = self._states(engines)
        if rollout_pb2.ENGINE_STATE_LEAVING in states.values():
            return None
        down = [name for name, state in states.items() if state == rollout_pb2.ENGINE_STATE_QUARANTINED]
        num_serving = sum(state == rollout_pb2.ENGINE_STATE_READY for state in states.values())
        if len(down) + num_serving < len(engines):
            return None
        if down:
            return (f"{num_serving} of {len(engines)} engines serve: see the log of {down[0]}", 1)
        engines_serve = "1 engine serves" if len(engines) == 1 else f"{len(engines)} engines serve"
        return (f"{engines_serve}, until the rollout service starts again: then it has the job's number", 0)

    def _states(self, engines: Sequence[rollout_pb2.Engine]) -> dict[str, int]:
        """The states by id. An engine that served before a publication serves its version while it takes part.

        One that had not joined yet serves nothing before the commit, and its `policy_version` means nothing.
        """
        return {
            engine.engine_id: rollout_pb2.ENGINE_STATE_READY
            if engine.state == rollout_pb2.ENGINE_STATE_UPDATING and self._has_served(engine)
            else engine.state
            for engine in engines
        }

    def _has_served(self, engine: rollout_pb2.Engine) -> bool:
        return self._seen.get(engine.engine_id) == rollout_pb2.ENGINE_STATE_READY


def _sentence(engine: rollout_pb2.Engine, state: int) -> str:
    if state == rollout_pb2.ENGINE_STATE_READY:
        return f"serves version {engine.policy_version}"
    if state == rollout_pb2.ENGINE_STATE_DOWN:
        return f"ended and is started again: {one_line(engine.trouble)}"
    if state == rollout_pb2.ENGINE_STATE_QUARANTINED:
        return f"ended too often and stays down: {one_line(engine.trouble)}"
    return _SENTENCES[state]
