"""One rank's part in giving weights to the engines through files, on a disk or in the machine's shared memory.

A publication's folder is a whole Hugging Face folder, written as an export is: every stage's sender writes its own
files at the same time, a failure on one rank is every rank's, and the folder gets its name once it is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.errors import HeadraceError, PublicationAborted
from headrace.rpc.log import log
from services.trainer.control.messages import Probed, Sent, StageWeights
from services.trainer.control.transport.source import WeightSource
from services.trainer.megatron.parallel import Layout
from services.trainer.weights.hashing import Hashing
from services.trainer.weights.memory_files import MemoryFiles, make_private


class WeightWriter:
    """Writes below `root`, at most `file_bytes` to a file.

    With `memory` it lays files there and says their checksums when it is asked for them: engines load meanwhile, where
    the weights stay on their device.
    """

    def __init__(
        self,
        policy: WeightSource,
        layout: Layout,
        is_aborted: Callable[[str], bool],
        *,
        root: Path,
        file_bytes: int,
        memory: MemoryFiles | None = None,
        hashes: bool = True,
        leaves: bool = False,
    ) -> None:
        """`hashes`: what engines print can be computed here. `leaves`: weights leave their device once written."""
        self._policy = policy
        self._is_aborted = is_aborted
        self._root = root
        self._file_bytes = file_bytes
        self._memory = memory
        self._stage = layout.pp_rank
        self._is_sender = layout.tp_rank == 0 and layout.dp_rank == 0
        self._hashes = hashes
        self._says_later = memory is not None and not leaves
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self._hashing = Hashing(self._thread)
        self._written_id: str | None = None

    def describe(self) -> StageWeights | None:
        return StageWeights(self._stage, [self._policy.hf_tensor_specs()]) if self._is_sender else None

    def probe(self) -> Probed | None:
        found = self._policy.probe()
        return Probed(*found) if found and self._is_sender else None

    def open(self, service: int) -> None:
        """Nobody meets anybody."""

    def hashed(self) -> None:
        """A version is always written: engines that come back load it from its folder."""

    def keep(self) -> None:
        """The served version's folder stays by itself."""

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Writes the current weights into the publication's folder; with `kept` says the checksums of those there."""
        if kept:
            assert publication_id == self._written_id, "only what was written last is hashed"
            return Sent(self._stage, self._hashing.result()) if self._is_sender else None
        started = time.monotonic()
        try:
            num_bytes = self._write(publication_id)
        except HeadraceError as error:
            log.warning("writing_weights_failed", publication_id=publication_id, error=error.message)
            return Sent(self._stage, {}, error.message) if self._is_sender else None
        if not self._is_sender:
            return None
        seconds = round(time.monotonic() - started, 3)
        log.info("weights_written", publication_id=publication_id, num_bytes=num_bytes, seconds=seconds)
        return Sent(self._stage, {} if self._says_later else self._hashing.result())

    def drop(self, services: Collection[int]) -> None:
        """Rank 0 deletes what is not needed any more."""

    def _write(self, publication_id: str) -> int:
        """Returns this sender's bytes, once its folder is whole; their hashing may go on."""
        num_bytes, hashing = 0, Hashing(self._thread)
        self._hashing, self._written_id = hashing, publication_id

        def look(content: Mapping[str, torch.Tensor]) -> None:
            nonlocal num_bytes
            if self._is_aborted(publication_id):
                raise PublicationAborted(f"{publication_id} was given up while it was written")
            num_bytes += sum(tensor.nbytes for tensor in content.values())
            if self._hashes:
                hashing.add(list(content.items()))

        if self._memory:
            make_private(self._root)  # with the same outcome on all ranks: they are on one machine
        write = self._memory.write if self._memory else None
        self._policy.export(self._root / publication_id, self._file_bytes, look, write)
        return num_bytes
