"""Trackers that get metrics beside the run's folder: TensorBoard, Weights & Biases.

Keys never come near them: W&B reads its own from WANDB_API_KEY or ~/.netrc, a job has no option for one, and what is
uploaded of the job has passed `without_secrets`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from headrace.errors import ConfigError
from headrace.job.schema.run import TrackingSection
from headrace.job.schema.secrets import without_secrets
from headrace.rpc.log import log


class Tracker(Protocol):
    """Somebody who keeps a run's numbers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of one step."""

    def close(self) -> None:
        """Returns when everything is kept."""


OpenTrackers = Callable[[int], Sequence[Tracker]]
"""Opens them at the step from which the run goes on: what an earlier start wrote of later steps is dropped."""


def trackers(config: TrackingSection, run_name: str, job: Mapping[str, Any], folder: Path) -> OpenTrackers:
    """Returns the trackers that the job asks for; `job` is the whole job in JSON's types, for W&B to show."""

    def opened(step: int) -> Sequence[Tracker]:
        found: list[Tracker] = []
        if config.use_tensorboard:
            found.append(TensorBoard(folder, step))
        if config.use_wandb:
            found.append(Wandb(config, run_name, job, folder))
        return found

    return opened


class TensorBoard:
    """Events in the run's folder."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder / "tensorboard"
        self._maybe_writer: SummaryWriter | None = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes them to the file at once. What a full disk refuses is left out: metrics.jsonl has it later."""
        try:
            if self._maybe_writer is None:
                self._maybe_writer = SummaryWriter(str(self._folder))
            for name, value in metrics.items():
                self._maybe_writer.add_scalar(name, value, step)
            self._maybe_writer.flush()
        except OSError as error:
            self._maybe_writer = None  # its thread ended with the error
            log.warning("tensorboard_not_written", step=step, error=str(error))

    def close(self) -> None:
        """Closes the file; a full disk raises nothing."""
        if self._maybe_writer:
            with suppress(OSError):
                self._maybe_writer.close()


class Wandb:
    """A run of Weights & Biases. A trainer that starts again goes on with the same run: its id is the folder's."""

    def __init__(self, config: TrackingSection, run_name: str, job: Mapping[str, Any], folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "use_wandb needs the package wandb: pip install 'headrace[wandb]'", field="use_wandb"
            ) from error
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            entity=config.wandb_team,
            name=run_name,
            id=hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12],
            resume="allow",
            mode=config.wandb_mode,
            dir=str(folder),
            config=without_secrets(job),
            settings=wandb.Settings(silent=True, disable_code=True, disable_git=True, x_disable_stats=True),
        )
        self._newest = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handed to W&B's own process, which uploads it when it can. It drops what is older than its newest step."""
        self._newest = max(self._newest, step)
        self._run.log(dict(metrics), step=self._newest)

    def close(self) -> None:
        """Waits for W&B's process."""
        self._run.finish()
