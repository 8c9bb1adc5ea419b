"""The jobs for GPUs that users copy pass the check that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "ranks", "engines"),
    [
        ("eight_gpus", "4 ranks", "4 behind"),
        ("two_machines", "8 ranks", "2 behind"),
        ("fp8", "128 ranks", "2 behind the router (manual), 16 tensor-parallel processes"),
    ],
)
def test_a_job_for_gpus_passes_its_check_on_another_machine(
    capsys: pytest.CaptureFixture[str], name: str, ranks: str, engines: str
) -> None:
    assert main(["check", str(EXAMPLES / name / "job.toml"), "--elsewhere", "--fast"]) == 0
    plan = capsys.readouterr().out
    assert ranks in plan
    assert engines in plan
    assert "refused" not in plan
