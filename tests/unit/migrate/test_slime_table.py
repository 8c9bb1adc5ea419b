"""docs/migrate.md's table of slime's flags is that of today's options."""

from __future__ import annotations

from tools.slime_table import PAGE, fate, flags, page


def test_the_document_has_todays_table():
    assert page(PAGE.read_text()) == PAGE.read_text(), "python -m tools.slime_table --write"


def test_a_flag_is_taken_refused_or_unknown():
    assert fate("rollout-batch-size") == ("taken", "")
    assert fate("update-weight-disk-dir") == ("taken", "as `--update-weight-disk-path`")
    assert fate("offload")[0] == "refused"
    assert fate("memory-recorder") == ("unknown", "")


def test_few_of_slimes_flags_are_unknown():
    unknown = [flag for flag in flags() if fate(flag)[0] == "unknown"]
    assert len(unknown) <= 7
