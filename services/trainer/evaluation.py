"""Evaluations that the job asks for, run by the rollout service on whatever version the engines serve."""

from __future__ import annotations

import uuid

from headrace.api.rollout.v1 import rollout_pb2 as rollout
from headrace.api.sample.v1 import sample_pb2 as sample
from headrace.client.rollout import RolloutClient
from headrace.config.job import Job
from headrace.errors import HeadraceError
from headrace.rpc.log import log
from services.trainer.schedule import JobSchedule
from services.trainer.state import TrainState

_SECONDS = 3600.0


class Evaluator:
    """`await evaluator(state)` gives eval/NAME, eval/NAME/response_length and eval/NAME/failed; {} when none is due."""

    def __init__(self, job: Job, client: RolloutClient, schedule: JobSchedule) -> None:
        self._client = client
        self._schedule = schedule
        sampling = sample.SamplingParams(
            temperature=job.eval.eval_temperature,
            max_new_tokens=job.eval.eval_max_response_len or job.rollout.rollout_max_response_len,
            stop=job.rollout.rollout_stop,
            stop_token_ids=job.rollout.rollout_stop_token_ids,
        )
        self._datasets = [
            rollout.EvalDataset(
                name=name,
                path=str(path.resolve()),
                n_samples_per_prompt=job.eval.n_samples_per_eval_prompt,
                sampling=sampling,
                input_key=job.data.input_key,
                label_key=job.data.label_key or "",
                metadata_key=job.data.metadata_key or "",
            )
            for name, path in job.eval.eval_prompt_data
        ]

    async def __call__(self, state: TrainState) -> dict[str, float]:
        if not self._schedule.evaluates(state):
            return {}
        try:
            results = await self._client.evaluate(uuid.uuid4().hex, self._datasets, deadline_seconds=_SECONDS)
        except HeadraceError as error:  # it says how well the run does, the run does not depend on it
            log.error("evaluation_failed", step=state.step, reason=error.reason, error=error.message)
            return {}
        metrics: dict[str, float] = {}
        for result in results:
            metrics[f"eval/{result.name}"] = result.mean_reward
            metrics[f"eval_length/{result.name}"] = result.mean_response_tokens
            metrics[f"eval_failed/{result.name}"] = float(result.num_failed)
        log.info("evaluated", step=state.step, **metrics)
        return metrics
