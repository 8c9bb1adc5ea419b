"""The table of roles in docs/security.md, from headrace/rpc/access.py.

python -m tools.roles            refuses a table that is stale
python -m tools.roles --write    writes it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.rpc.access import ALLOWED, Role

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
_BEGIN = "<!-- written by python -m tools.roles --write -->\n"
_END = "<!-- end of what tools.roles writes -->\n"


def table() -> str:
    """A row for each RPC, a column for each role."""
    lines = [f"| RPC | {' | '.join(Role)} |", f"|---|{'---|' * len(Role)}"]
    for service, methods in ALLOWED.items():
        for method, allowed in methods.items():
            cells = " | ".join("yes" if role in allowed else "" for role in Role)
            lines.append(f"| `{service.rpartition('.')[2]}.{method}` | {cells} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with today's table. Raises ValueError for one without the two marks."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    page = PAGE.read_text()
    wanted = with_table(page)
    if "--write" in arguments:
        PAGE.write_text(wanted)
    elif page != wanted:
        print("docs/security.md has another table of roles: python -m tools.roles --write")
        return 1
    print(f"{sum(map(len, ALLOWED.values()))} RPCs and {len(Role)} roles are in docs/security.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
