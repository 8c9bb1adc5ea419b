"""What a person hears of a service's log: the one line that matters, and not what surrounds it."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.process.log_file import MAX_BYTES, doing, last_error, open_log, tail

APEX = (
    "/x/megatron/core/optimizer/__init__.py:24: UserWarning: Transformer Engine and Apex are not installed.\n"
    "  warnings.warn(\n"
    "/x/torchvision/io/image.py:13: UserWarning: Failed to load image Python extension: 'Could'\n"
    "  warn(\n"
)


def event(name: str, **fields: str) -> str:
    return json.dumps({"event": name, **fields}) + "\n"


def test_the_line_of_a_failure_is_told_without_the_warnings_around_it(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(APEX + event("joining") + event("trainer_failed", level="error", error="lr is negative") + APEX)
    assert last_error(log, 0) == "lr is negative"
    assert "Apex" not in tail(log)
    assert "warn(" not in tail(log)


def test_of_several_ranks_the_first_cause_is_told(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    lost = event("trainer_failed", level="error", reason="PEER_LOST", error="rank 1 is gone")
    log.write_text(
        lost + "    " + event("trainer_failed", level="error", reason="DATA_LOSS", error="no weights") + lost
    )
    assert last_error(log, 0) == "no weights"


def test_what_an_earlier_start_said_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(event("trainer_failed", level="error", error="old"))
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("Segmentation fault\n" + event("engine_starting"))
    assert last_error(log, start) is None
    assert doing(log, start) == "engine starting"
    assert "old" not in tail(log, start=start)


def test_the_end_of_an_engines_log_is_shown_as_lines(tmp_path: Path) -> None:
    log = tmp_path / "rollout.log"
    why = "ended with exit code 1; the end of its log:\nTraceback (most recent call last):\nMemoryError"
    log.write_text(event("engine_lost", engine="engine-0", why=why))
    assert tail(log).splitlines() == [
        '    {"event": "engine_lost", "engine": "engine-0"}',
        "      why: ended with exit code 1; the end of its log:",
        "      Traceback (most recent call last):",
        "      MemoryError",
    ]
    with log.open("a") as file:
        file.write(event("rollout_failed", level="error", message=why))
    assert last_error(log, 0) == why


def test_a_process_that_starts_for_ever_fills_no_disk(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    for start in range(5):
        with open_log(log) as file:
            file.truncate(MAX_BYTES + 1)  # as long as if it had been written, without a disk's work
            file.seek(0, 2)
            file.write(f"\nstart {start}\n".encode())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine-0.log", "engine-0.log.1"]
    assert "start 4" in tail(log)
    assert "start 3" in tail(tmp_path / "engine-0.log.1")
