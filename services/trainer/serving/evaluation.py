"""Evaluations that the job asks for, run by the rollout service on whatever version the engines serve."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import HeadraceError
from headrace.rpc.log import log
from headrace.wire.checks import one_line
from services.trainer.schedule import JobSchedule
from services.trainer.serving.console import Evaluated
from services.trainer.state import TrainState

_SECONDS = 3600.0


class JobEvaluator:
    """`await evaluator(state)` gives what a data set's samples came to, or why they came to nothing."""

    def __init__(
        self, datasets: Sequence[rollout_pb2.EvalDataset], client: RolloutClient, schedule: JobSchedule
    ) -> None:
        self._datasets = datasets
        self._client = client
        self._schedule = schedule

    async def __call__(self, state: TrainState) -> Evaluated | None:
        """None when none is due. Whatever goes wrong is a warning and a metric: the run does not depend on it."""
        if not self._schedule.evaluates(state):
            return None
        try:
            results = await self._client.evaluate(uuid.uuid4().hex, self._datasets, deadline_seconds=_SECONDS)
        except Exception as error:  # noqa: BLE001  # of the client's own, too: no mistake in an evaluation is worth the run
            reason = error.reason if isinstance(error, HeadraceError) else type(error).__name__
            log.error("evaluation_failed", step=state.step, reason=reason, error=str(error))
            return Evaluated({"eval_error": 1.0}, (f"the evaluation failed, {reason}: {one_line(str(error))}",))
        metrics = {"eval_error": 0.0}
        for result in results:
            metrics[f"eval/{result.name}"] = result.mean_reward
            metrics[f"eval_length/{result.name}"] = result.mean_response_tokens
            metrics[f"eval_failed/{result.name}"] = float(result.num_failed)
        log.info("evaluated", step=state.step, **metrics)
        return Evaluated(metrics, [_unscored(result) for result in results if result.num_failed])


def _unscored(result: rollout_pb2.EvalResult) -> str:
    of = result.num_failed + result.num_samples
    return f"{result.num_failed} of {of} samples of {result.name} have no score and are left out of its mean"
