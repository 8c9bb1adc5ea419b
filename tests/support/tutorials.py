"""The tutorials, cut into blocks. `python -m tests.support.tutorials PAGE [FOLDER]` runs a page whole.

What a page's fences mean:
- A block of code whose first line is `# NAME` is the file NAME.
- A `bash` block is run, in the page's order and in one shell. A `shell` block needs a run or machines that are not
  here: it is not run, but its commands are checked as all are.
- `<!-- another terminal -->` before a block leaves it running while the page goes on. `<!-- after step N -->` waits
  until a run has trained N steps, `<!-- after terminal N -->` until the Nth such block has ended. `<!-- fails -->` says
  that the block's last command fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}

_SECONDS = 1500.0
_NOTE = r"^<!-- (?:another terminal|after (?:step|terminal) \d+|fails) -->\n"
_BLOCK = re.compile(rf"(?P<notes>(?:{_NOTE})*)^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M)
_FILE = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\n")
_FUNCTIONS = r"""
set -euo pipefail
terminals=()
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
after_step() {
    until grep -qsE "\"step\": $1,.*\"samples/count\"" runs/*/metrics.jsonl; do
        [ -n "$(jobs -r)" ] || { echo "ended before step $1"; exit 1; }
        sleep 0.5
    done
}
after_terminal() { wait "${terminals[$1 - 1]}"; unset "terminals[$1 - 1]"; }
end_of_page() { for pid in "${terminals[@]}" $(jobs -pr); do wait "$pid"; done; }
"""


@dataclass(frozen=True, slots=True)
class Block:
    """`file` is the name of the file that the block is, if it is one; `waits_for` a command of `_FUNCTIONS`."""

    language: str
    text: str
    another_terminal: bool
    waits_for: str
    fails: bool

    @property
    def file(self) -> str | None:
        named = _FILE.match(self.text)
        return named[1] if named else None

    @property
    def commands(self) -> Sequence[str]:
        """The lines of a shell, with continued ones joined."""
        is_shell = self.language in ("bash", "shell") and not self.file
        return self.text.replace("\\\n", " ").splitlines() if is_shell else ()


def blocks(page: str) -> Sequence[Block]:
    """Every fenced block, in order."""
    return [_block(found) for found in _BLOCK.finditer(PAGES[page].read_text())]


def _block(found: re.Match[str]) -> Block:
    awaited = re.search(r"after (step|terminal) (\d+)", found["notes"])
    return Block(
        language=found["language"],
        text=found["text"],
        another_terminal="another terminal" in found["notes"],
        waits_for=f"after_{awaited[1]} {awaited[2]}" if awaited else "",
        fails="fails" in found["notes"],
    )


def script(page: str) -> str:
    """The page as a program of bash."""
    return "\n".join([_FUNCTIONS, *_lines(blocks(page)), "end_of_page"])


def _lines(found: Sequence[Block]) -> Iterator[str]:
    for block in found:
        if block.waits_for:
            yield block.waits_for
        if block.file:
            folder = Path(block.file).parent
            yield f"mkdir -p {folder}\ncat > {block.file} <<'END_OF_FILE'\n{block.text}END_OF_FILE"
        elif block.language != "bash":
            continue
        elif block.another_terminal:
            yield f"(\nset -x\n{block.text}) & terminals+=($!)"
        elif block.fails:
            yield f"if (\nset -x\n{block.text}); then echo 'this was to fail'; exit 1; fi"
        else:
            yield f"set -x\n{block.text}{{ set +x; }} 2>/dev/null"


def run(page: str, folder: Path, variables: Mapping[str, str] | None = None) -> int:
    """Runs the page in the folder with this Python's commands. Returns the exit code of the first that failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment.pop("XDG_CACHE_HOME", None)  # the pages name the small model in ~/.cache
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= variables or {}
    words = ["bash", "-c", script(page)]
    return subprocess.run(words, cwd=folder, env=environment, timeout=_SECONDS, check=False).returncode


def main(words: Sequence[str]) -> int:
    """Runs one page, or `all`; a folder that is named is kept."""
    page, *rest = words
    for name in PAGES if page == "all" else [page]:
        print(f"── {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"tutorial-{name}-") as scratch:
            folder = Path(rest[0]) / name if rest else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            if code := run(name, folder):
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
