"""The table of slime's own flags in docs/migrate.md, from headrace's options, aliases and refusals.

    python -m tools.slime_table            refuses a stale table
    python -m tools.slime_table --write    writes it

tools/slime_flags.txt has the names that slime's parser adds to Megatron's and SGLang's.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.load.flags import UNSUPPORTED, parse_flags
from headrace.job.megatron import RESERVED
from headrace.job.option import ALIASES, options

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "migrate.md"
_BEGIN, _END = "<!-- slime's flags: python -m tools.slime_table --write -->", "<!-- end -->"


def flags() -> list[str]:
    """Every flag of slime's own parser, by name."""
    return sorted((ROOT / "tools" / "slime_flags.txt").read_text().split())


def fate(flag: str) -> tuple[str, str]:
    """What becomes of a flag, and what to know."""
    name = flag.replace("-", "_")
    if why := UNSUPPORTED.get(name) or RESERVED.get(name):
        return "refused", why
    option = ALIASES.get(name, name)
    if option in options():
        return "taken", "" if option == name else f"as `--{option.replace('_', '-')}`"
    try:
        parse_flags([f"--{flag}"], options())
    except ConfigError:
        return "unknown", ""
    return "taken", ""


def table() -> str:
    """The counts, and the table of what is not simply taken."""
    fates = {flag: fate(flag) for flag in flags()}
    count = Counter(state for state, _ in fates.values())
    taken = ", ".join(f"`{flag}`" for flag, (state, note) in fates.items() if state == "taken" and not note)
    rows = [
        f"| `{flag}` | {state} | {note.replace('|', chr(92) + '|')} |"
        for flag, (state, note) in fates.items()
        if state != "taken" or note
    ]
    summary = (
        f"slime's parser has {len(fates)} flags of its own. headrace takes {count['taken']}, refuses "
        f"{count['refused']} with a reason, and does not know {count['unknown']}."
    )
    return "\n".join((summary, "", "| flag | | |", "|---|---|---|", *rows, "", f"Taken by their name: {taken}."))


def page(text: str) -> str:
    """The document with today's table."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after}"


def main(arguments: list[str]) -> int:
    written = PAGE.read_text()
    if "--write" in arguments:
        PAGE.write_text(page(written))
        return 0
    if page(written) != written:
        print("docs/migrate.md is stale: python -m tools.slime_table --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
