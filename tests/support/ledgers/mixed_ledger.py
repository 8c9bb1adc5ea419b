"""A ledger under a fake clock whose stream mixes files that need not be there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.buffer.ledger.group import Group, Prompt
from services.buffer.ledger.stream import Cursor, FileSource, StreamConfig, StreamState
from tests.support.ledgers.ledger_under_test import LedgerUnderTest

WEIGHTS = {"math": 5.0, "code": 2.0, "chat": 1.0}


@dataclass
class Mixed(LedgerUnderTest):
    """A ledger whose files are endless, or have so many rows; read as the application reads them."""

    rows: Mapping[str, int] = field(default_factory=dict)

    def create_mixed(self, weights: Mapping[str, float] = WEIGHTS, **changes: object) -> None:
        files = tuple(FileSource(f"{name}.jsonl", "prompt", weight=weight) for name, weight in weights.items())
        config = {"n_samples_per_prompt": 2, "groups_per_step": 8, "max_staleness": 1, "files": files, **changes}
        stream = StreamConfig(name="train", **config)  # type: ignore[arg-type]
        state = StreamState(stream, cursors=tuple(Cursor() for _ in files))
        self.do(self.ledger.create_stream(self.now, state))

    def lease(self, count: int = 100) -> list[Group]:
        while any(counts := self.ledger.stream("train").prompts_wanted(count)):
            state = self.ledger.stream("train").state
            prompts, cursors, ended = [], [], []
            for file, cursor, wanted in zip(state.config.files, state.cursors, counts, strict=True):
                left = self.rows.get(file.path.removesuffix(".jsonl"), 1 << 30) - cursor.row
                end = cursor.row + min(wanted, left)
                prompts.append([Prompt(f"{file.path}:{row}@0", b"?") for row in range(cursor.row, end)])
                cursors.append(Cursor(row=end, prompts_read=end))
                ended.append(left <= wanted)
            self.do(self.ledger.read(self.now, "train", prompts, cursors, ended))
        return super().lease(count)

    def of(self, groups: Sequence[Group]) -> Counter[str]:
        return Counter(group.prompt.prompt_id.split(".")[0] for group in groups)
