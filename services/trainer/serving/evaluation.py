"""One evaluation that the job asks for, run by the rollout service on whatever versions the engines serve."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.rollout import Rollout
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.rpc.log import log
from headrace.wire.checks import one_line
from services.trainer.data.evaluated_samples import EvaluatedSamples
from services.trainer.serving.evaluation_log import EvaluationLog
from services.trainer.serving.evaluations import Evaluated
from services.trainer.state import TrainState


class JobEvaluator:
    """`await evaluator(state, names)` returns the metrics of the data sets so named, or why there are none."""

    def __init__(
        self,
        datasets: Sequence[rollout_pb2.EvalDataset],
        client: Rollout,
        *,
        seconds: float,
        samples: EvaluatedSamples | None = None,
        users_log: EvaluationLog | None = None,
    ) -> None:
        self._datasets = datasets
        self._client = client
        self._seconds = seconds
        self._samples = samples
        self._users_log = users_log

    async def __call__(self, state: TrainState, names: Sequence[str]) -> Evaluated:
        """Evaluates. What goes wrong is a warning and a metric: the run does not depend on it."""
        started = time.monotonic()
        seen: list[sample_pb2.Sample] = []
        try:
            results = await self._of_some_service(state, [each for each in self._datasets if each.name in names], seen)
        except Exception as error:  # noqa: BLE001  # of the client's own, too: no mistake in an evaluation is worth the run
            reason = error.reason if isinstance(error, HeadraceError) else type(error).__name__
            log.error("evaluation_failed", step=state.step, reason=reason, error=str(error))
            return Evaluated({"eval_error": 1.0}, (f"the evaluation failed, {reason}: {one_line(str(error))}",))
        metrics = {"eval_error": 0.0, "eval_seconds": time.monotonic() - started}
        for result in results:
            metrics |= _metrics(result)
        log.info("evaluated", step=state.step, **metrics)
        warnings = [_unscored(result) for result in results if result.num_failed]
        if self._users_log is None:
            return Evaluated(metrics, warnings)
        logged = await self._users_log(state.step, seen)
        untracked = tuple(metrics) if logged.alone else ()
        return Evaluated({**logged.metrics, **metrics}, [*warnings, *logged.warnings], untracked)

    async def _of_some_service(
        self, state: TrainState, datasets: Sequence[rollout_pb2.EvalDataset], seen: list[sample_pb2.Sample]
    ) -> Sequence[rollout_pb2.EvalResult]:
        """Evaluates, and starts again on another rollout service, if there is one, when the first one dies."""
        for others in reversed(range(len(self._client.services))):
            try:
                return await self._results(state, datasets, seen)
            except Unavailable as error:
                if not others:
                    raise
                log.warning("evaluated_by_another_service", step=state.step, error=error.message)
                seen.clear()
        raise AssertionError("unreachable: the last service's results are returned, or its error is raised")

    async def _results(
        self, state: TrainState, datasets: Sequence[rollout_pb2.EvalDataset], seen: list[sample_pb2.Sample]
    ) -> Sequence[rollout_pb2.EvalResult]:
        """Adds to `seen` all samples, where the user's log reads them.

        Raises DeadlineExceeded after `seconds`, Unavailable when the service ended without results.
        """
        results: Sequence[rollout_pb2.EvalResult] = ()
        try:
            async with asyncio.timeout(self._seconds):
                replies = self._client.watch_evaluation(
                    f"step-{state.step}-{uuid.uuid4().hex[:8]}",
                    datasets,
                    return_samples=self._samples is not None or self._users_log is not None,
                    deadline_seconds=self._seconds,
                )
                writing = self._samples.of_step(state.step) if self._samples else None
                async for reply in replies:
                    results = reply.results
                    if writing:
                        await writing.add(reply.samples)
                    if self._users_log is not None:
                        seen += reply.samples
                if writing:
                    await writing.close()
        except (TimeoutError, DeadlineExceeded) as error:
            raise DeadlineExceeded(
                f"it took longer than eval_timeout_seconds {self._seconds:g}: evaluate fewer samples, or raise "
                "--eval-timeout-seconds"
            ) from error
        if not results:
            raise Unavailable("the rollout service ended it without results")
        return results


def _metrics(result: rollout_pb2.EvalResult) -> dict[str, float]:
    metrics = {
        f"eval/{result.name}": result.mean_reward,
        f"eval_length/{result.name}": result.mean_response_tokens,
        f"eval_truncated/{result.name}": result.truncated_ratio,
        f"eval_failed/{result.name}": float(result.num_failed),
        f"eval_min_version/{result.name}": float(result.min_policy_version),
        f"eval_max_version/{result.name}": float(result.max_policy_version),
    }
    if result.HasField("low"):
        metrics |= {f"eval_low/{result.name}": result.low, f"eval_high/{result.name}": result.high}
    for each in result.pass_at_k:
        name = f"{result.name}@{each.k}"
        metrics[f"eval_pass/{name}"] = each.estimate
    return metrics


def _unscored(result: rollout_pb2.EvalResult) -> str:
    of = result.num_failed + result.num_samples
    return f"{result.num_failed} of {of} samples of {result.name} have no score and are left out of its mean"
