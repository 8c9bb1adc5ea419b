"""What docs/metrics.md says: names, and which of them every step has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|(?P<unit>[^|]*)\|(?P<meaning>.*)\| (?P<when>[^|]+) \|$")
_DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True)
class DocumentedMetric:
    name: str
    always: bool

    @property
    def pattern(self) -> re.Pattern[str]:
        """Capitals stand for any value."""
        return re.compile("[^/]+".join(re.escape(part) for part in re.split(r"[A-Z]+", self.name)))


def documented_metrics() -> list[DocumentedMetric]:
    rows = [match for line in _DOC.read_text().splitlines() if (match := _ROW.match(line.replace(r"\|", "¦")))]
    return [DocumentedMetric(row["name"], row["when"].strip() == "each step") for row in rows]


def undocumented(names: set[str]) -> set[str]:
    """Those that no row of the document names."""
    patterns = [metric.pattern for metric in documented_metrics()]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}
