"""The job's Python in the buffer: which functions it named, and what they are given. None of it comes over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.hooks import HookArgs, hook_args
from headrace.job.schema.job import Job
from services.buffer.prompts.data_source import DataSourceWalk
from services.buffer.runtime.chooser import GroupChooser


@dataclass(frozen=True, slots=True)
class UserCode:
    """Nothing, where the job names nothing."""

    args: HookArgs | None = None
    buffer_filter_path: str | None = None
    seconds: float = 60.0
    links: Path | None = None
    """The ledger's folder, where what a choice keeps in the temporary folder has its name"""

    @classmethod
    def of(cls, job: Job, links: Path) -> UserCode:
        """What the job says."""
        return cls(hook_args(job), job.buffer.buffer_filter_path, job.buffer.buffer_hook_timeout_seconds, links)

    async def chooser(self) -> GroupChooser | None:
        """Of selection HOOK. Raises ConfigError when it cannot be loaded."""
        if self.buffer_filter_path is None or self.args is None or self.links is None:
            return None
        chooser = GroupChooser(self.buffer_filter_path, self.args, self.links, seconds=self.seconds)
        await chooser.start()
        return chooser

    async def data_source(self, path: str) -> DataSourceWalk:
        """Raises ConfigError when it cannot be loaded, or when this process was started without its job."""
        if self.args is None:
            raise ConfigError(f"the ledger's prompts come from {path}, and no job says so here: start it with its job")
        walk = DataSourceWalk(path, self.args, seconds=self.seconds)
        await walk.start()
        return walk
