"""Weights that lie in a folder: engines load it whole, in one call, and none of them waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from headrace.models.exported import is_whole
from services.rollout.engine.fleet import Engine
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import Plan


class DiskInbound:
    """Loads folders below `root` and no others; None refuses them all."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights-folder")

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Nothing: the folder is looked at in `ready`, because a disk may hang."""

    async def ready(self, publication: Publication) -> None:
        """Raises FailedPrecondition unless the folder is below the root and whole."""
        folder, seconds = publication.plan.folder, publication.seconds_left()
        assert folder is not None, "the receiver chose this transport for a plan without a folder"
        looking = asyncio.get_running_loop().run_in_executor(self._reading, self._require_whole, folder)
        try:
            await asyncio.wait_for(looking, seconds)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{folder} could not be read within {seconds:.0f} s: see whether its disk answers"
            ) from error

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Nothing: an engine opens and closes its own session while it loads."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        folder = publication.plan.folder
        await publication.participants.apart(
            lambda e: e.client.load_folder(str(folder), seconds=publication.seconds_left())
        )

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Nothing was opened."""

    async def finish(self, publication: Publication) -> None:
        """The folder is the trainer's to delete."""

    def release(self, plan: Plan) -> None:
        """Nothing is remembered."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """No engine was bound to anything."""

    def _require_whole(self, folder: Path) -> None:
        if self._root is None:
            raise InvalidArgument("this rollout service was given no folder for weights", field="disk_path")
        try:
            root, resolved = self._root.resolve(), folder.resolve()
        except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of symlinks
            raise InvalidArgument(f"{folder} cannot be read: {error}", field="disk_path") from error
        if root not in resolved.parents:
            raise InvalidArgument(
                f"{folder} is not below {root}, where this rollout service expects weights: give it and the trainer "
                "the same --update-weight-disk-path",
                field="disk_path",
            )
        if not is_whole(resolved):
            raise FailedPrecondition(
                f"{folder} is not a whole folder of weights on the rollout service's machine: trainer and engines must "
                "see the same --update-weight-disk-path"
            )
