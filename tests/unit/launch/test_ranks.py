"""Where ranks meet, beside a launcher that was killed."""

from __future__ import annotations

from pathlib import Path

from headrace.launch.ranks.local import new_rendezvous


def test_what_a_killed_launcher_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    left = new_rendezvous(tmp_path)
    left.write_text("127.0.0.1 1 token")
    left.with_name(f"{left.name}.part").write_text("127.0.0.1")
    log = tmp_path / "trainer-rank-1.log"
    log.touch()
    assert new_rendezvous(tmp_path) != left
    assert list(tmp_path.iterdir()) == [log]
