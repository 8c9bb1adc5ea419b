"""Starting a few trainer ranks as torchrun would, without their start-up time, and what their cases have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from headrace.job.schema.job import Job
from tests.support.processes.leftovers import at_session_end
from tests.support.ranks.rank_host import Launch, RankHosts

Sections = Mapping[str, Mapping[str, Any]]
_HOSTS = RankHosts()
at_session_end(_HOSTS.close)


@dataclass(frozen=True)
class RankCase:
    """What all ranks do at once in `run`, with a job whose sections are laid over those of the kind's plain job."""

    name: str
    folder: str
    hf_checkpoint: str
    sections: Sections = field(default_factory=dict)
    ranks: int | None = None
    """Only so many of the ranks take part; None: all."""
    plain: ClassVar[Sections] = {}

    @property
    def out(self) -> Path:
        """Where its results are."""
        return Path(self.folder) / self.name

    def job(self) -> Job:
        """The job it stands for."""
        return laid_over(self.plain, {"model": {"hf_checkpoint": self.hf_checkpoint}}, self.sections)

    def policy(self) -> tuple[Any, Any]:
        """In a rank: the policy, and the layout that it was joined to."""
        from services.trainer.model.build import join_ranks, policy_of

        self.out.mkdir(parents=True, exist_ok=True)
        layout = join_ranks(self.job())
        return policy_of(self.job(), layout), layout

    def run(self) -> None:
        """In every rank at once."""
        raise NotImplementedError


def laid_over(*layers: Sections) -> Job:
    """The job of the leaves, each as the last of the layers has it."""
    sections: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, leaves in layer.items():
            sections[name] = sections.get(name, {}) | dict(leaves)
    return Job.model_validate(sections)


def run_cases(folder: Path, world_size: int, cases: Sequence[Any], timeout_seconds: float = 840.0) -> None:
    """Every rank calls `run` of each case, dataclasses of any module, one after the other.

    Raises AssertionError with a rank's last lines when one fails.
    """
    script = folder / f"cases-{world_size}.json"
    script.write_text(json.dumps([[type(case).__module__, type(case).__name__, asdict(case)] for case in cases]))
    logs = {str(rank): str(folder / f"rank-{world_size}-{rank}.log") for rank in range(world_size)}
    failed = folder / f"a-rank-of-{world_size}-failed"
    environment = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    codes = _HOSTS.run(Launch(str(script), logs, str(failed), timeout_seconds, environment))
    assert set(codes.values()) == {0}, "\n".join(
        f"rank {rank}: {codes[rank]}: {Path(log).read_text()[-3000:]}" for rank, log in logs.items()
    )
