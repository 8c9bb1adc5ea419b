"""Where the wall clock is read: nowhere for a duration, a deadline or an age, because it jumps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.limits import syntax_tree

ROOT = Path(__file__).parents[2]
_CALLS = frozenset(
    {
        *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "os.path.getmtime", "os.path.getctime"),
        *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
    }
)
_FIELDS = frozenset({"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime"})
_MAY_READ = re.compile(r"\btime\(|\b(now|utcnow|today|time_ns|localtime|gmtime|get[mc]time)\(|st_[amc]time")
"""Parsing all of the code would take seconds."""
ALLOWED = {
    "headrace/cli/authority.py": "from when to when a certificate is valid is said in dates",
    "headrace/cli/view/run_view.py": "a row of metrics.jsonl that is older than this view was seen before",
    "headrace/cli/view/stalls.py": "a person is told at what time a service answered last",
    "headrace/hooks/trial/stand_in.py": "`created` of a completion, as OpenAI's protocol has it",
    "headrace/process/log_file.py": "a log says when its process was started",
    "headrace/rpc/access.py": "a token's comment says when it was made",
    "headrace/disk.py": "a file whose time differs was changed; which is later does not matter",
    "headrace/run_folder.py": "which run was started last: a guess that names a run, and `RUN` overrides it",
    "headrace/sample_log.py": "of two files of one step the one written last is read first",
    "services/buffer/runtime/commit.py": "events say when they were; leases go by the monotonic time beside it",
    "services/buffer/store/columns.py": "a file whose time differs was changed; which is later does not matter",
    "services/rollout/agents/endpoint.py": "`created` of a model, as OpenAI's protocol has it",
    "services/rollout/agents/protocol.py": "`created` of a completion, as OpenAI's protocol has it",
    "services/rollout/scoring.py": "since when a reward service is asked is told to people",
    "services/trainer/serving/report.py": "rows of metrics say when they were",
}


def readings(source: str) -> Iterator[str]:
    """Every place that reads the wall clock, or the time of a file."""
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in _FIELDS or any(name == call or name.endswith(f".{call}") for call in _CALLS):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"from time import {each.name}" for each in node.names if f"time.{each.name}" in _CALLS)


def test_the_wall_clock_is_read_only_where_a_date_is_meant() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("headrace", "services")
        for path in (ROOT / folder).rglob("*.py")
        if _MAY_READ.search(source := path.read_text()) and list(readings(source))
    }
    assert found == set(ALLOWED), "use time.monotonic() for what lasts, or say here why a date is meant"


@pytest.mark.parametrize(
    "line",
    [
        "import time; time.time()",
        "from time import time; time()",
        "import datetime; datetime.datetime.now(datetime.UTC)",
        "from datetime import datetime; datetime.now()",
        "path.stat().st_mtime",
        "import os; os.path.getmtime(path)",
    ],
)
def test_a_reading_of_the_wall_clock_is_found(line: str) -> None:
    assert list(readings(line))
    assert not list(readings("import time; time.monotonic(); time.perf_counter()"))
