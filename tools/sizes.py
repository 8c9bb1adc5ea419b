"""No file is longer than a person reads in one sitting: `python -m tools.sizes`.

How long and how branched a function may be is Ruff's to say (pyproject.toml).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 900
_GENERATED = ("headrace/api",)


def sources(root: Path) -> Iterator[Path]:
    """Every module that a person writes."""
    for top in ("headrace", "services", "tests", "tools"):
        for file in sorted((root / top).rglob("*.py")):
            if not file.relative_to(root).as_posix().startswith(_GENERATED):
                yield file


def too_long(root: Path) -> list[str]:
    """A sentence for each file of more than MOST_LINES lines."""
    lines = {file.relative_to(root).as_posix(): file.read_text().count("\n") for file in sources(root)}
    return [f"{name}: {count} lines, at most {MOST_LINES}" for name, count in lines.items() if count > MOST_LINES]


def main(root: Path = ROOT) -> int:
    """Prints what is too long; the exit status of the gate."""
    found = too_long(root)
    print("\n".join(found) if found else f"no file is longer than {MOST_LINES} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
