"""The job's Python in the buffer: the functions that it names and their arguments. None of it comes over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.hooks import HookArgs
from services.buffer.prompts.data_source import DataSourceReader
from services.buffer.runtime.chooser import GroupChooser


@dataclass(frozen=True, slots=True)
class UserCode:
    """A job that names no functions has the defaults."""

    args: HookArgs | None = None
    buffer_filter_path: str | None = None
    seconds: float = 60.0
    links: Path | None = None
    """The ledger's folder, with links to the temporary folders of choices."""

    async def chooser(self) -> GroupChooser | None:
        """Returns None without a buffer_filter. Raises ConfigError when the function cannot be loaded."""
        if self.buffer_filter_path is None or self.args is None or self.links is None:
            return None
        chooser = GroupChooser(self.buffer_filter_path, self.args, self.links, seconds=self.seconds)
        await chooser.start()
        return chooser

    async def data_source(self, path: str) -> DataSourceReader:
        """Raises ConfigError when the class cannot be loaded, or when this process was started without its job."""
        if self.args is None:
            raise ConfigError(
                f"the ledger's prompts come from {path}, but this process has no job: start it with its job"
            )
        reader = DataSourceReader(path, self.args, seconds=self.seconds)
        await reader.start()
        return reader
