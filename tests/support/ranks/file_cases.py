"""Two ranks that save and export while one of them has a disk that refuses, and go on: a rank's part in the tests.

Each step of a case ends on both ranks with the same line in log-RANK.txt: "ok", or the error's class and message.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.job.schema.job import Job
from headrace.job.schema.run import CheckpointSection

if TYPE_CHECKING:
    from services.trainer.control.senders import WeightWriter

FULL_BYTES = 20_000


@dataclass(frozen=True)
class FilesCase:
    """`folder` is the run's; the model is in `hf_checkpoint`, a smaller one with the same names in `smaller`."""

    folder: str
    hf_checkpoint: str
    smaller: str
    async_save: bool
    megatron: dict[str, Any]

    def run(self) -> None:
        """In both ranks at once."""
        _run(self)


def _run(case: FilesCase) -> None:  # noqa: PLR0915  # one case, told in order
    import torch.distributed as dist

    from services.trainer.checkpoint.checkpoint import Checkpoints
    from services.trainer.control.senders import WeightWriter
    from services.trainer.model.build import join_ranks, policy_of

    run, rank = Path(case.folder), int(os.environ["RANK"])
    sections = {"model": {"hf_checkpoint": case.hf_checkpoint}, "checkpoint": {"async_save": case.async_save}}
    job = Job.model_validate({**sections, "rollout": {"num_rollout": 2}, "megatron": case.megatron})
    layout = join_ranks(job)
    policy = policy_of(job, layout)
    checkpoints = Checkpoints(job.checkpoint, run, layout)

    def step(work: Callable[[], None]) -> None:
        with (run / f"log-{rank}.txt").open("a") as log:
            try:
                work()
                print("ok", file=log)
            except HeadraceError as error:
                print(f"{type(error).__name__}: {error.message}", file=log)
        dist.barrier()

    def save(number: int, epoch: int = 5) -> None:
        checkpoints.save(policy.saved, step=number, policy_version=number, epoch=epoch)
        checkpoints.flush()

    writer = WeightWriter(policy, layout, lambda _: False, root=run / "weights", file_bytes=1 << 20)

    step(lambda: save(1))
    for ill in (0, 1):
        with full_disk(ill == rank):
            step(lambda: save(2))
        with full_disk(ill == rank):
            step(lambda: policy.export(run / "exports" / "full"))
        with full_disk(ill == rank):
            step(partial(_send, writer, f"e1-v{ill}-0a1b2c3d", rank, run))
    if rank == 0:
        (run / "taken").write_text("no folder")
        (run / "used").mkdir()
        (run / "used" / "file").touch()
    step(lambda: policy.export(run / "taken" / "below"))
    step(lambda: policy.export(run / "used"))
    if rank == 0:
        (run / "checkpoints").rename(run / "elsewhere")
        (run / "checkpoints").write_text("no folder")
    step(lambda: save(2))
    if rank == 0:
        (run / "checkpoints").unlink()
        (run / "elsewhere").rename(run / "checkpoints")
    step(lambda: save(2))
    step(lambda: save(3, epoch=4))
    step(lambda: policy.export(run / "exports" / "full"))
    if rank == 0:
        (run / "exports" / "full" / "model.safetensors").write_bytes(b"torn")
    step(lambda: policy.export(run / "exports" / "full"))
    if rank == 1:
        shutil.rmtree(run / "checkpoints" / "step-00000002")
    dist.barrier()
    step(lambda: print(checkpoints.restore_latest(policy.saved), file=(run / f"restored-{rank}.txt").open("w")))
    smaller = job.model_copy(update={"model": job.model.model_copy(update={"hf_checkpoint": Path(case.smaller)})})
    other = policy_of(smaller, layout)
    step(lambda: print(checkpoints.restore_latest(other.saved)))
    initial = CheckpointSection(initial_megatron_checkpoint=run / "checkpoints" / "step-00000001")
    step(lambda: print(policy_of(smaller.model_copy(update={"checkpoint": initial}), layout)))


def _send(writer: WeightWriter, publication_id: str, rank: int, run: Path) -> None:
    """Leaves the error of this rank's answer in a file: a publication raises none."""
    sent = writer.send(publication_id, {})
    (run / f"sent-{publication_id}-{rank}.txt").write_text(str(sent and sent.error))


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    """This process cannot write files longer than FULL_BYTES; the others can."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
