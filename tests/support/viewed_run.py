"""The folder of a run that has ended, with what `headrace view` reads: made by the parts that write it in a run."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.job.schema.job import Job
from headrace.job.schema.production import RolloutSection
from headrace.job.schema.run import ModelSection, RunSection
from headrace.run_folder import MetricsRow, RunFolder, ServiceEntry
from headrace.sample_log import Answer, SampleLog, TokenColumns
from headrace.trajectory import Failure
from tests.support.ledgers.answers import answered

MEGABYTE = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028"


def viewed_run(folder: Path, model: Path, steps: int = 2) -> RunFolder:
    """Two groups of two samples a step, an evaluation, a failed and a filtered group; tokens of the first step."""
    run = RunFolder(folder / "runs" / "one")
    job = Job(
        model=ModelSection(hf_checkpoint=model),
        rollout=RolloutSection(num_rollout=steps, rollout_batch_size=2, n_samples_per_prompt=2),
        run=RunSection(run_name="one", run_dir=folder / "runs"),
    )
    run.create(job)
    run.write_services({"trainer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    log = SampleLog(run.samples)
    rows = [MetricsRow(0, 1.0, {"eval/sums": 0.25})]
    for step in range(1, steps + 1):
        answers = [_answer(step, group, index) for group in range(2) for index in range(2)]
        log.write_step(step, 0, answers, MEGABYTE)
        metrics = {"reward/mean": step / 4, "samples/count": 4.0, "samples/produced": 8.0, "staleness/lag_0": 1.0}
        rows.append(MetricsRow(step, 1.0 + step, metrics, marks=("restart",) if step == steps else ()))
    log.write_tokens(
        1, 0, [TokenColumns("1-0/1", [72, 105, 10, 11, 12], [1, 0], [-0.5, -1.0], [-0.25, None], [1.0, 1.0])], MEGABYTE
    )
    evaluated = answered("e", "2 + 3 =", "5", group_id="eval/sums/0")
    log.write_evaluated(steps, [Answer.of(evaluated, steps)], MEGABYTE, is_new=True)
    failed = answered("f", "why?", "", group_id="failed", failure=Failure("SCORER_RAISED", "KeyError"))
    dropped = Answer.of(answered("d", "easy", "4", group_id="dropped"), dropped_reason="all rewards are 1")
    log.write_untrained(log.new_untrained_file(), [Answer.of(failed), dropped], MEGABYTE)
    run.metrics.write_text("".join(json.dumps(row.fields()) + "\n" for row in rows))
    return run


def _answer(step: int, group: int, index: int) -> Answer:
    name = f"{step}-{group}"
    sample = answered(f"{name}/{index}", f"prompt {group}", HOSTILE, group_id=name, reward=float(index), label="4")
    return Answer.of(sample, step)
