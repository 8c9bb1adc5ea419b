"""Checksums of weights that are computed by a thread, beside what is done with the weights meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from services.trainer.weights.engine_layout import EngineChecksums

_HASHED_LATER = 4  # parts that are used before they are hashed: their tensors stay until then


class Hashing:
    """The checksums of one publication; `thread` has one worker, because parts of a tensor come in order."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._checksums = EngineChecksums()
        self._running: deque[Future[None]] = deque()

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes in (Hugging Face name, tensor) pairs, which must stay as they are until they are hashed."""
        self._running.append(self._thread.submit(self._checksums.update, tensors))
        if len(self._running) > _HASHED_LATER:
            self._running.popleft().result()

    def result(self) -> dict[str, str]:
        """Engine name → checksum, once all of it is hashed."""
        while self._running:
            self._running.popleft().result()
        return self._checksums.result()
