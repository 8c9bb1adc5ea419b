"""Which checkpoints stay, by the rows of a long run. What Checkpoints does with it is in `test_checkpoint`."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from headrace.job.schema.run import CheckpointSection
from services.trainer.checkpoint.checkpoint import superfluous


def test_the_rows_of_a_long_run_are_not_read_into_memory_to_find_the_best(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as lines:
        lines.writelines(json.dumps({"step": step, "reward/mean": step % 777}) + "\n" for step in range(20_000))
    section = CheckpointSection(keep_last=1, keep_best=1)
    tracemalloc.start()
    may_go = superfluous(section, file, [776, 10_000, 15_000])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert may_go == [10_000]
    assert most < file.stat().st_size / 8
