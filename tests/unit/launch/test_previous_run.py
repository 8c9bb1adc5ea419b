"""A run that is started again: where it goes on, what changed, and what cannot change."""

from __future__ import annotations

from pathlib import Path

from headrace.job.schema.job import Job
from headrace.launch.previous_run import has_ended, is_finished, previous_run, resumption
from headrace.run_folder import RunFolder, ServiceEntry


def started(load_with, folder: Path, *flags: str, step: int = 0) -> tuple[RunFolder, Job]:
    job = load_with("--run-dir", str(folder), "--num-rollout", "9", *flags)
    run = RunFolder(folder / job.run.run_name)
    run.create(job)
    (run.ledger / "state.sqlite").touch()
    for each in (1, step):
        (run.path / "checkpoints" / f"step-{each:08}").mkdir(parents=True, exist_ok=True)
    (run.path / "checkpoints" / ".draft-2").mkdir()
    return run, job


def test_a_start_says_where_it_goes_on_and_what_changed(load_with, tmp_path: Path) -> None:
    run, _ = started(load_with, tmp_path, "--lr", "5e-6", step=6)
    earlier = previous_run(run)
    assert earlier is not None
    again = load_with(
        "--run-dir", str(tmp_path), "--num-rollout", "12", "--lr", "1e-5", "--buffer-address", "127.0.0.1:1"
    )
    assert resumption(earlier, again) == "resuming after step 6; num_rollout 9 -> 12; lr 5e-6 -> 1e-5"


def test_a_run_without_a_ledger_may_change_everything(load_with, tmp_path: Path) -> None:
    run, _ = started(load_with, tmp_path)
    (run.ledger / "state.sqlite").unlink()
    earlier = previous_run(run)
    assert earlier is not None
    assert "rollout_seed 42 -> 7" in resumption(earlier, load_with("--rollout-seed", "7"))


def test_a_run_is_finished_when_its_last_step_is_saved_and_its_export_is_there(load_with, tmp_path: Path) -> None:
    run, job = started(load_with, tmp_path, step=9)
    assert is_finished(run, job)
    assert not is_finished(run, load_with("--num-rollout", "10"))
    assert not is_finished(run, load_with("--num-rollout", "9", "--save-hf", str(tmp_path / "absent")))


def test_a_run_has_ended_when_nothing_that_it_started_lives(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_services({"buffer": ServiceEntry("h:1", None, None)})
    assert not has_ended(run)
    run.write_services({"buffer": ServiceEntry("h:1", None, None), "trainer": ServiceEntry("h:2", None, 2**22 + 1)})
    assert has_ended(run)


def test_a_folder_of_an_earlier_version_says_nothing(tmp_path: Path) -> None:
    assert previous_run(RunFolder(tmp_path)) is None
    (tmp_path / "job.json").write_text('{"run": 3}')
    assert previous_run(RunFolder(tmp_path)) is None
