"""Trackers of a run: TensorBoard, Weights & Biases, trackio and MLflow. A new one is a class and a line in `_TRACKERS`.

Each tracker has a thread of its own: one that fails or hangs neither stops nor slows the training. Keys never reach a
tracker: W&B and MLflow read theirs from the environment, and the job that they show has passed `without_secrets`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

import psutil
from torch.utils.tensorboard import SummaryWriter

from headrace.errors import ConfigError
from headrace.job.schema.run import TrackingSection, without_secrets
from headrace.rpc.log import log
from headrace.sample_log import Answer, SampleLog, conversation

MAX_ROLLOUTS = 32
"""Rollouts of a step that a tracker gets."""
MAX_WAITING = 1000
"""Calls that wait for one tracker. It misses those beyond."""
_CLOSE_SECONDS = 15.0
"""After them a run ends without the tracker: less than a service has to end (`launch.process.GRACE_SECONDS`)."""


class Tracker(Protocol):
    """Keeps a run's numbers and rollouts. Each method may raise and may take its time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None: ...

    def close(self) -> None:
        """Returns when everything is kept."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is opened with."""

    config: TrackingSection
    name: str
    job: Mapping[str, Any]
    """The whole job in JSON's types, without secrets."""
    folder: Path
    step: int = 0
    """The run continues after this step; 0 is a new run."""

    @property
    def id(self) -> str:
        """The same for each start of the run."""
        return hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:12]


class TensorBoard:
    """Events in the run's folder; rollouts are text."""

    def __init__(self, run: TrackedRun) -> None:
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        self._writer.add_text("rollouts", "\n\n---\n\n".join(map(_markdown, rollouts)), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose id is the folder's; rollouts are tables."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=run.config.wandb_project,
            group=run.config.wandb_group,
            entity=run.config.wandb_team,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=run.config.wandb_mode,
            dir=str(run.folder),
            config=dict(run.job),
            settings=wandb.Settings(silent=True, disable_code=True, disable_git=True, x_disable_stats=True),
        )
        self._newest = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands them to W&B's own process. W&B drops what is older than its newest step, so nothing is."""
        self._newest = max(self._newest, step)
        self._run.log(dict(metrics), step=self._newest)

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        rows = [_row(answer) for answer in rollouts]
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._newest = max(self._newest, step)
        self._run.log({"rollouts": table}, step=self._newest)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, in TRACKIO_DIR or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says; rollouts are traces."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trace = trackio.Trace
        self._run = trackio.init(
            project=run.config.trackio_project,
            name=run.name,
            config=dict(run.job),
            resume="allow" if run.step else "never",  # names are no ids: a new run may have an old one's
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        traces = []
        for answer in rollouts:
            facts = {name: value for name, value in _row(answer).items() if name not in ("prompt", "response")}
            facts["rollout_status"] = facts.pop("status")  # trackio's own status is that of a request
            traces.append(self._trace(messages=[dict(turn) for turn in conversation(answer)], metadata=facts))
        self._run.log({"rollouts": traces}, step=step)

    def close(self) -> None:
        self._run.finish()


_NOT_MLFLOWS = re.compile(r"[^\w\-. :/]")
"""What a name of MLflow may not have; the reason of a filter may."""
_PARAMS_AT_ONCE = 100
_PARAM_LENGTH = 500


class Mlflow:
    """A run of MLflow, on MLFLOW_TRACKING_URI or in the run's folder; rollouts are a CSV table for each step."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        store, files = run.folder.absolute() / "mlflow", None
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            store.mkdir(exist_ok=True)
            uri, files = f"sqlite:///{store / 'mlflow.db'}", (store / "artifacts").as_uri()
        self._client = MlflowClient(uri)
        self._run_id = self._continued(run.id, run, files)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(_NOT_MLFLOWS.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        """Stores a table, in place of that of an earlier attempt at the step."""
        text, rows = io.StringIO(), [_row(answer) for answer in rollouts]
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        self._client.log_text(self._run_id, text.getvalue(), f"rollouts/step-{step:07}.csv")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _continued(self, run_id: str, run: TrackedRun, files: str | None) -> str:
        """The id of the run with this tag, or of a new one."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "headrace")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, files)
        for old in self._client.search_runs([experiment_id], f"tags.headrace_run = '{run_id}'", max_results=1):
            self._client.update_run(old.info.run_id, status="RUNNING")
            return str(old.info.run_id)
        new = self._client.create_run(experiment_id, run_name=run.name, tags={"headrace_run": run_id})
        options = [(f"{name}.{key}", value) for name, section in run.job.items() for key, value in section.items()]
        params = [self._param(name, str(value)[:_PARAM_LENGTH]) for name, value in options if value is not None]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(new.info.run_id, params=params[start : start + _PARAMS_AT_ONCE])
        return str(new.info.run_id)


_TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""By the name of their package, of their extra, and of their option after `use_`."""


class Trackers:
    """The trackers that a job asks for. No method waits for one, but `close`, and that has a deadline."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        self._threads = threads

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.put(step, lambda tracker: tracker.log(step, metrics))

    def log_rollouts(self, step: int, samples: SampleLog) -> None:

        @cache
        def chosen() -> Sequence[Answer]:
            return spread(list(samples.of_step(step)), MAX_ROLLOUTS)

        def call(tracker: Tracker) -> None:
            if rollouts := chosen():
                tracker.log_rollouts(step, rollouts)

        for thread in self._threads:
            thread.put(step, call)

    def close(self) -> None:
        """Ends them all within one deadline."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.end()
        closed = [thread.join(max(0.0, deadline - time.monotonic())) for thread in self._threads]
        if not all(closed):
            _end_wandb()


OpenTrackers = Callable[[int], Trackers]
"""Opens them at the step after which the run continues: what an earlier start wrote of later steps is dropped."""


def trackers(config: TrackingSection, run_name: str, job: Mapping[str, Any], folder: Path) -> OpenTrackers:
    """Returns the trackers that the job asks for. Raises ConfigError for one whose package is not installed."""
    names = [name for name in _TRACKERS if getattr(config, f"use_{name}")]
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"use_{name} needs the package {name}: pip install 'headrace[{name}]'", field=f"use_{name}"
            )
    run = TrackedRun(config, run_name, without_secrets(job), folder)

    def opened(step: int) -> Trackers:
        at_step = replace(run, step=step)
        return Trackers([TrackerThread(name, _TRACKERS[name], at_step) for name in names])

    return opened


def _end_wandb() -> None:
    """Ends W&B's own process, for which this one would wait at its exit. `wandb sync` uploads what is left."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb"):
            child.kill()


class TrackerThread:
    """One tracker in a thread. What the tracker misses is counted, and a warning says so once."""

    def __init__(self, name: str, opener: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self._name = name
        self._opener = opener
        self._run = run
        """Its step is the last one that the tracker has."""
        self._calls = SimpleQueue[tuple[int, Callable[[Tracker], None]] | None]()
        self._lock = Lock()
        self._num_missed = 0
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self.put(run.step, lambda tracker: None)  # opens it now: a failure shows before the first step
        self._thread.start()

    def put(self, step: int, call: Callable[[Tracker], None]) -> None:
        if self._calls.qsize() < MAX_WAITING:
            self._calls.put((step, call))
        else:
            self._miss(f"{MAX_WAITING} calls wait for it")

    def end(self) -> None:
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Waits until the tracker is closed; False when it is not by then."""
        self._thread.join(seconds)
        is_closed = not self._thread.is_alive()
        missed = self._num_missed + (0 if is_closed else self._calls.qsize())
        if missed or not is_closed:
            log.warning("tracker_incomplete", tracker=self._name, missed_calls=missed, closed=is_closed)
        return is_closed

    def _serve(self) -> None:
        tracker = None
        while (item := self._calls.get()) is not None:
            step, call = item
            try:
                tracker = tracker or self._opener(self._run)
                call(tracker)
                self._run = replace(self._run, step=max(step, self._run.step))
            except Exception as error:  # noqa: BLE001  # others' code, and no tracker is worth a run
                self._miss(str(error) or type(error).__name__)
                tracker = None  # TensorBoard's writer has ended with its first error
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # noqa: BLE001  # as above
            self._miss(str(error) or type(error).__name__)

    def _miss(self, reason: str) -> None:
        with self._lock:
            self._num_missed += 1
            is_first = self._num_missed == 1
        if is_first:
            log.warning("tracker_failed", tracker=self._name, error=reason, kept="metrics.jsonl has every row")


def spread(answers: Sequence[Answer], most: int) -> Sequence[Answer]:
    """Chooses evenly in the order of rewards: the worst, the best, and between them each so many."""
    ordered = sorted(answers, key=lambda answer: (answer.reward is not None, answer.reward or 0.0))
    if len(ordered) <= most:
        return ordered
    return [ordered[number * (len(ordered) - 1) // (most - 1)] for number in range(most)]


def _row(answer: Answer) -> dict[str, Any]:
    versions = [version for version, _, _ in answer.policy_ranges]
    return {
        "step": answer.step,
        "reward": answer.reward,
        "advantage": answer.advantage,
        "prompt": answer.prompt,
        "response": answer.response,
        "label": answer.label,
        "scorer": f"{answer.scorer} {answer.scorer_version}".strip(),
        "status": answer.status,
        "policy_version": max(versions, default=None),
        "group_id": answer.group_id,
        "sample_id": answer.sample_id,
    }


def _markdown(answer: Answer) -> str:
    facts = {name: value for name, value in _row(answer).items() if name not in ("prompt", "response")}
    parts = [", ".join(f"**{name}** {value}" for name, value in facts.items())]
    for turn in conversation(answer):
        said = "\n".join(f"    {line}" for line in turn["content"].splitlines())  # code: shown as it is
        parts.append(f"{turn['role']}:\n\n{said}")
    return "\n\n".join(parts)
