"""A user's function that evaluates whole data sets: its rewards become the evaluation's numbers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import ConfigError, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.failure import call_failure
from headrace.hooks.rollout.evaluation import EvalData, EvalDataset, EvalSample
from headrace.hooks.rollout.function import ACCEPTED, EvalReport, load_rollout, run_eval_rollout
from headrace.limits import MAX_COUNTER, MAX_ID_CHARACTERS, require_name, whole_number
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Failure, PolicyRange, Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.evaluation.dataset import EvalPlan
from services.rollout.evaluation.estimates import Tally

_LOAD_SECONDS = 120.0


class EvalFunction:
    """Calls the function at `path` in a worker process, one evaluation after another.

    `evaluates` is False for a rollout function that does not take `evaluation`: headrace evaluates then.
    """

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        params: SamplingParams,
        *,
        seconds: float,
        must_evaluate: bool = True,
    ) -> None:
        self._path = path
        self._args = args
        self._weights = weights
        self._params = params
        self._seconds = seconds
        self._must_evaluate = must_evaluate
        self._pool = WorkerPool(1)
        self.evaluates = True

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded, or takes no `evaluation` although it has to."""
        try:
            self.evaluates = await self._pool.run(load_rollout, self._path, timeout_seconds=_LOAD_SECONDS)
        except WorkerError as error:
            raise ConfigError(error.message, field="eval.eval_function_path") from error
        if self._must_evaluate and not self.evaluates:
            raise ConfigError(
                f"hook {self._path} takes no argument `evaluation`; accepted are:\n  {ACCEPTED[0]}",
                field="eval.eval_function_path",
            )

    async def close(self) -> None:
        await self._pool.close()

    async def evaluate(
        self, datasets: Sequence[pb.EvalDataset], plans: Sequence[EvalPlan]
    ) -> tuple[list[Sample], list[Tally]]:
        """Returns all samples, and their sums by data set.

        Raises FailedPrecondition where the function fails or lacks a data set, InvalidArgument for its numbers.
        """
        args = HookArgs({**self._args, "eval_datasets": [_named(*each) for each in zip(datasets, plans, strict=True)]})
        report = await self._called(args, {plan.name: key for plan in plans if (key := self._key(plan)) is not None})
        missing = [plan.name for plan in plans if plan.name not in report.data]
        if missing:
            raise FailedPrecondition(
                f"hook {self._path} returned nothing of {', '.join(missing)}, only of {sorted(report.data) or 'none'}",
                reason="EVALUATION_FAILED",
            )
        log.info("eval_function_returned", hook=self._path, metrics=report.metrics)
        return self._evaluated(report, {plan.name: plan for plan in plans})

    def _key(self, plan: EvalPlan) -> str | None:
        key: str | None = plan.reward_key or self._args.get("eval_reward_key") or self._args.get("reward_key")
        return key

    async def _called(self, args: HookArgs, reward_keys: Mapping[str, str]) -> EvalReport:
        work = (self._path, args, self._weights.policy_version, self._params.for_engine(), reward_keys)
        try:
            report: EvalReport = await self._pool.run(
                run_eval_rollout, *work, timeout_seconds=self._seconds, name=f"hook {self._path}"
            )
        except (WorkerError, HeadraceError) as error:
            failure = call_failure(error)
            raise FailedPrecondition(failure.message, reason="EVALUATION_FAILED") from error
        return report

    def _evaluated(self, report: EvalReport, plans: Mapping[str, EvalPlan]) -> tuple[list[Sample], list[Tally]]:
        evaluation_id, samples, tallies = uuid.uuid4().hex[:8], list[Sample](), list[Tally]()
        for name, data in report.data.items():
            plan = plans.get(require_name(name, "datasets.name"))
            tally = Tally(name, _most_of_one(data), plan.pass_reward if plan else 1.0)
            for number, (row, each) in enumerate(zip(data.prompts, data.samples, strict=True)):
                sample = self._stored(f"eval-{evaluation_id}/{name}/{row}", number, each)
                tally.add(row, sample)
                samples.append(sample)
            tallies.append(tally)
        return samples, tallies

    def _stored(self, group_id: str, number: int, each: EvalSample) -> Sample:
        length = each.response_length
        failed = each.reward is None
        return Sample(
            sample_id=f"{group_id}/{number}",
            group_id=group_id,
            index=number,
            prompt=each.prompt,
            response=each.response,
            tokens=_tokens(each),
            loss_mask=np.zeros(length, np.uint8),
            rollout_log_probs=np.zeros(length, np.float32),
            status=Status.FAILED if failed else Status.TRUNCATED if each.truncated else Status.COMPLETED,
            failure=Failure("HOOK_FAILED", each.why_failed or "it has no reward") if failed else None,
            label=each.label,
            reward=each.reward,
            scorer=f"hook {self._path}"[-MAX_ID_CHARACTERS:],
            policy_ranges=(PolicyRange(self._oldest(each), 0, length),) if length else (),
        )

    def _oldest(self, each: EvalSample) -> int:
        """The policy version of a sample; names of weights begin with it."""
        numbers = [name.partition(".")[0] for name in each.weight_versions]
        known = [whole_number(number, MAX_COUNTER) for number in numbers]
        return min(number for number in (*known, self._weights.policy_version) if number is not None)


def _tokens(each: EvalSample) -> NDArray[np.int32]:
    """A sample has at least one, which stands for those that the function left out."""
    try:
        return np.asarray(each.tokens or [0], np.int32)
    except OverflowError as error:
        raise InvalidArgument(f"a sample of an evaluation has tokens that are none: {error}") from error


def _most_of_one(data: EvalData) -> int:
    return max((data.prompts.count(row) for row in set(data.prompts)), default=1)


def _named(asked: pb.EvalDataset, plan: EvalPlan) -> EvalDataset:
    return EvalDataset(
        name=plan.name,
        path=asked.path,
        n_samples_per_eval_prompt=plan.n_samples,
        temperature=plan.params.temperature,
        top_p=plan.params.top_p,
        top_k=plan.params.top_k,
        max_response_len=plan.params.max_new_tokens,
        min_new_tokens=plan.params.min_new_tokens,
        input_key=asked.input_key,
        label_key=asked.label_key or None,
        metadata_key=asked.metadata_key or None,
        tool_key=asked.tool_key or None,
        rm_type=asked.rm_type or None,
    )
