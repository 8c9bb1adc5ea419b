"""The checkpoints that stay: the newest, and those whose step did best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.job.schema.run import CheckpointSection
from headrace.limits import object_of_line
from headrace.run_folder import step_of


@dataclass(frozen=True, slots=True)
class Retention:
    """`metric` is looked up in the run's metrics.jsonl: of the step after which the checkpoint was taken."""

    keep_last: int
    keep_best: int
    metric: str
    metrics_file: Path

    @classmethod
    def of(cls, config: CheckpointSection, run_dir: Path) -> Retention:
        """The job's rule for the checkpoints of the run in `run_dir`."""
        return cls(config.keep_last, config.keep_best, config.keep_best_metric, run_dir / "metrics.jsonl")

    def superfluous(self, steps: Iterable[int]) -> list[int]:
        """The steps among `steps` whose checkpoints may go."""
        newest_first = sorted(steps, reverse=True)
        kept = set(newest_first[: self.keep_last])
        scores = self._scores(newest_first) if self.keep_best else {}
        scored = sorted((s for s in newest_first if s in scores), key=lambda s: scores[s], reverse=True)
        return [step for step in newest_first if step not in kept | set(scored[: self.keep_best])]

    def _scores(self, steps: Iterable[int]) -> dict[int, float]:
        """The metric of each of these steps; a step that was run again counts as it ran last."""
        if not self.metrics_file.is_file():
            return {}
        scores, wanted = {}, set(steps)
        with self.metrics_file.open("rb") as lines:
            for line in lines:
                # Of a million lines a few are decoded.
                if step_of(line) in wanted and (row := object_of_line(line)) and self.metric in row:
                    scores[int(row["step"])] = float(row[self.metric])
        return scores
