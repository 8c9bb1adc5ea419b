"""The evaluations of a run as its job wants them. Only this module of the folder reads a whole job."""

from __future__ import annotations

from headrace.client.rollout import Rollout
from headrace.hooks import hook_args
from headrace.job.eval_dataset import eval_dataset
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.job import Job
from headrace.run_folder import RunFolder
from headrace.sample_log import SampleLog
from services.trainer.data.evaluated_samples import EvaluatedSamples
from services.trainer.schedule import JobSchedule
from services.trainer.serving.evaluation import JobEvaluator
from services.trainer.serving.evaluation_log import EvaluationLog
from services.trainer.serving.evaluations import Evaluations, JobEvaluations, NoEvaluations
from services.trainer.serving.report import RunReport


def evaluations_of(
    job: Job, rollout: Rollout | None, schedule: JobSchedule, report: RunReport, folder: RunFolder
) -> Evaluations:
    """Evaluates on the data sets that the job names, where there are engines."""
    if rollout is None or not job.eval.is_asked_for:
        return NoEvaluations()
    datasets = [eval_dataset(each, job.eval, job.rollout, job.data) for each in eval_sets(job.eval)]
    num_bytes = job.tracking.sample_log_bytes
    samples = EvaluatedSamples(SampleLog(folder.samples), num_bytes) if num_bytes else None
    path = job.hooks.custom_eval_rollout_log_function_path
    users_log = EvaluationLog(path, hook_args(job)) if path else None
    evaluator = JobEvaluator(
        datasets, rollout, seconds=job.eval.eval_timeout_seconds, samples=samples, users_log=users_log
    )
    waits = job.eval.eval_exact_version or job.placement.colocate  # there it needs the devices to itself
    return JobEvaluations(evaluator, schedule, report, exact=waits)
