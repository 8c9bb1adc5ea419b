"""Records a trainer's bad end in its run's folder, because torchrun and srun keep neither exit code nor message.

Rank 0 writes it last of all; the next start of the trainer removes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.disk import replacing


@dataclass(frozen=True, slots=True)
class Ending:
    """`exit_code` is rank 0's own; `message` is for a person."""

    exit_code: int
    message: str

    def write(self, file: Path) -> None:
        """Writes the file atomically."""
        with replacing(file) as draft:
            draft.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Ending | None:
        """None when no trainer has ended with an error, or when the file is damaged."""
        try:
            tree = json.loads(file.read_text(errors="replace"))
            return cls(int(tree["exit_code"]), str(tree["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
