"""Data sources: a user's class that gives prompts, and may be given what was generated, to be trained on once more."""

from headrace.hooks.data_source.base import RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer"]
