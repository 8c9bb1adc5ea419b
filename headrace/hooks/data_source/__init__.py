"""Data sources: a user's class that gives prompts, and may be given what was generated, to be trained on once more."""

from __future__ import annotations

from typing import Any

from headrace.hooks.sample import Sample


class RolloutDataSource:
    """Gives the rows of `--prompt-data`, each once in an epoch."""

    def __init__(self, dataset: Any, args: Any) -> None:
        """`dataset` is a `headrace.hooks.data_source.dataset.Dataset`, `args` are the job's options."""
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        """One sample for each prompt; fewer than `num_samples` end the run's prompts."""
        return list(self.dataset.sample(num_samples))

    def add_samples(self, samples: list[Sample]) -> None:
        """Called with the samples of every group that was generated and scored."""


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Keeps generated samples in `buffer`. `buffer_filter` chooses those that are trained again."""

    def __init__(self, dataset: Any, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Sample] = []

    def add_samples(self, samples: list[Sample]) -> None:
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: list[Sample], num_samples: int) -> list[Sample]:
        """Returns at most `num_samples` samples of the buffer, which leave it; here the oldest."""
        return buffer[:num_samples]
