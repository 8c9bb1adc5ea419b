"""The texts of a trained step: written beside the training, there before a checkpoint covers the step."""

from __future__ import annotations

from pathlib import Path

from headrace.sample_log import Answer, SampleLog
from services.trainer.data.samples import SamplesRead, TrainedSamples, UnusableSample
from tests.support.ledgers.answers import answered


def test_what_a_step_read_and_trained_is_written(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples")
    gone = UnusableSample("c", "NOT_FOUND", "gone")
    read = SamplesRead(lambda ids: [gone if name == "c" else answered(name) for name in ids], step=4)
    assert [one.sample_id for one in read(["a", "b"])] == ["a", "b"]
    assert read(["b", "c"])[1] is gone
    writer = TrainedSamples(log, 0, 1 << 20)
    writer.write(4, read.of(["a"]))
    writer.wait()
    assert [(one.sample_id, one.step) for one in log.of_step(4)] == [("a", 4)]


def test_a_full_disk_is_a_warning_and_no_end_of_training(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    writer = TrainedSamples(SampleLog(tmp_path / "samples"), 0, 1 << 20)
    for step in (1, 2):
        writer.write(step, [Answer.of(answered("a"), step)])
    writer.wait()
