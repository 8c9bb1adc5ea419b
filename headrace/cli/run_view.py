"""What is known of a running job, and how it looks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.config.job import Job

_BARS = "▁▂▃▄▅▆▇█"
_NOTES_SHOWN = 4
_SPARKS_SHOWN = 48


class RunView:
    """Written by the follower and the launcher, read by the display. One event loop, so no locks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._started = time.monotonic()
        self._notes: deque[str] = deque(maxlen=200)
        self._unread: deque[str] = deque()
        self._status: trainer_pb2.GetStatusResponse | None = None
        self._fleet: rollout_pb2.GetFleetResponse | None = None
        self._tokens: deque[tuple[float, int]] = deque(maxlen=20)
        self._rewards: dict[int, float] = {}
        self._evaluations: dict[str, dict[int, float]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._latest: Mapping[str, float] = {}
        self.ended = False

    def note(self, line: str) -> None:
        """Something a person should read once."""
        self._notes.append(line)
        self._unread.append(line)

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True

    def unread(self) -> list[str]:
        """Lines since the last call, for plain output."""
        lines = list(self._unread)
        self._unread.clear()
        return lines

    def on_status(self, status: trainer_pb2.GetStatusResponse) -> None:
        """The trainer's answer."""
        self._status = status

    def on_fleet(self, fleet: rollout_pb2.GetFleetResponse) -> None:
        """The rollout service's answer."""
        self._fleet = fleet
        self._tokens.append((time.monotonic(), fleet.tokens_produced))

    def on_progress(self, row: trainer_pb2.WatchProgressResponse) -> None:
        """A finished step (counted from 1) or evaluation. A step that is trained again replaces the first."""
        key = (row.step, row.time.ToNanoseconds())
        if key in self._seen:
            return
        self._seen.add(key)
        metrics = dict(row.metrics)
        if "reward/mean" in metrics:
            self._rewards[row.step] = metrics["reward/mean"]
        for name, value in metrics.items():
            if name.startswith("eval/") and name.count("/") == 1:
                self._evaluations.setdefault(name, {})[row.step] = value
        self._latest = {**self._latest, **metrics}
        if shown := _shown(metrics):
            self._unread.append(f"step {row.step}/{self._job.rollout.num_rollout}  {shown}")

    def tokens_per_second(self) -> float:
        """Response tokens over the last twenty answers."""
        if len(self._tokens) < 2:
            return 0.0
        (first, before), (last, after) = self._tokens[0], self._tokens[-1]
        return max(after - before, 0) / max(last - first, 1e-9)

    def summary(self) -> list[str]:
        """How the run went, in a few lines."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        lines = [f"finished {len(self._rewards)} steps in {minutes} min {seconds} s"]
        rewards = [self._rewards[step] for step in sorted(self._rewards)]
        if len(rewards) >= 6:
            before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
            lines.append(f"mean reward: first three steps {before:.3f}, last three {after:.3f}")
        for name, values in sorted(self._evaluations.items()):
            first, last = min(values), max(values)
            lines.append(f"{name}: {values[first]:.3f} after step {first}, {values[last]:.3f} after step {last}")
        return lines

    def __rich__(self) -> RenderableType:
        notes = "\n".join(list(self._notes)[-_NOTES_SHOWN:])
        return Panel(Group(self._table(), notes), title=f"headrace · {self._job.run.run_name}", title_align="left")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        table.add_column()
        step, steps, phase = self._position()
        table.add_row("step", _bar(step, steps), f"{step}/{steps}  {phase}")
        if self._status and self._status.groups_per_step:
            ready, wanted = self._status.groups_ready, self._status.groups_per_step
            table.add_row("groups", _bar(ready, wanted), f"{ready}/{wanted} ready")
        rewards = [self._rewards[step] for step in sorted(self._rewards)]
        table.add_row("reward", sparkline(rewards[-_SPARKS_SHOWN:]), f"{rewards[-1]:.3f}" if rewards else "–")
        for name, values in sorted(self._evaluations.items()):
            shown = [values[step] for step in sorted(values)]
            table.add_row(name, sparkline(shown[-_SPARKS_SHOWN:]), f"{shown[-1]:.3f}")
        table.add_row("training", _shown(self._latest, skip=("reward/mean",)) or "–", "")
        table.add_row("rollout", *self._rollout())
        return table

    def _position(self) -> tuple[int, int, str]:
        if self._status is None:
            return 0, self._job.rollout.num_rollout, "starting"
        phase = trainer_pb2.Phase.Name(self._status.phase).removeprefix("PHASE_").lower()
        return self._status.step, self._status.num_steps or self._job.rollout.num_rollout, phase

    def _rollout(self) -> tuple[str, str]:
        if self._fleet is None:
            return "starting", ""
        ready = sum(engine.state == rollout_pb2.ENGINE_STATE_READY for engine in self._fleet.engines)
        return (
            f"{ready}/{len(self._fleet.engines)} engines ready, {self._fleet.samples_in_flight} samples in flight, "
            f"{self.tokens_per_second():.0f} tokens/s",
            f"policy version {self._fleet.policy_version}",
        )


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(done, total), width=_SPARKS_SHOWN)


def _shown(metrics: Mapping[str, float], skip: Sequence[str] = ()) -> str:
    names = ("reward/mean", "loss/policy", "loss/sft", "grad_norm", "response_length/mean", "time/train_seconds")
    wanted = [name for name in metrics if name in names or (name.startswith("eval/") and name.count("/") == 1)]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in wanted if name not in skip)
