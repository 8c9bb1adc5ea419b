"""PyTorch's profiler around single training steps, a file for each step and rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.rpc.log import log
from services.trainer.megatron.parallel import Layout

_MOST_ALLOCATIONS = 200_000


class StepProfiler:
    """Profiles the steps of a range, counted from 1 as in metrics.jsonl, into a folder."""

    def __init__(self, steps: range, folder: Path, layout: Layout) -> None:
        self._steps = steps
        self._folder = folder
        self._layout = layout

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is the step's training on this rank. Writing takes some seconds, and no later step has them."""
        if number not in self._steps:
            yield
            return
        file = self._folder / f"step-{number:07}-rank-{self._layout.rank}"
        is_on_gpu = self._layout.device.type == "cuda"
        if is_on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_on_gpu else [])]
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiled:
            yield
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(f"{file}.json.gz")
            if is_on_gpu:
                torch.cuda.memory._dump_snapshot(f"{file}.memory.pickle")
        except OSError as error:  # a full disk: no reason to end the run
            log.warning("profile_not_written", file=str(file), error=str(error))
        finally:
            if is_on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profiled", step=number, file=f"{file}.json.gz")
