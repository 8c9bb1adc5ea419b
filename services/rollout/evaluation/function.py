"""A user's function that evaluates whole data sets: its rewards become the evaluation's numbers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from headrace.errors import ConfigError, FailedPrecondition, HeadraceError
from headrace.hooks import HookArgs, from_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.failure import call_failure
from headrace.hooks.rollout.function import ACCEPTED, EvalReport, load_rollout, run_eval_rollout
from headrace.hooks.rollout.outputs import EvalDataset
from headrace.job.eval_sets import PASS_REWARD
from headrace.limits import MAX_COUNTER, require_name, whole_number
from headrace.process.workers import WorkerError
from headrace.rpc.log import log
from headrace.trajectory import PolicyRange, Sample
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.evaluation.dataset import EvalPlan
from services.rollout.evaluation.estimates import Tally
from services.rollout.production.hooks import UserFunction, with_reward

_FIELD = "eval_function_path"


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
        self._must_evaluate = must_evaluate
        self._function = UserFunction(path, load_rollout, _FIELD, seconds)
        self.evaluates = True

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded, or takes no `evaluation` although it has to."""
        try:
            self.evaluates = await self._function.start()
        except ConfigError as error:
            raise ConfigError(error.message, field=f"eval.{_FIELD}") from error
        if self._must_evaluate and not self.evaluates:
            raise ConfigError(
                f"hook {self._path} takes no argument `evaluation`; accepted are:\n  {ACCEPTED[0]}",
                field=f"eval.{_FIELD}",
            )

    async def close(self) -> None:
        await self._function.close()

    async def evaluate(self, plans: Sequence[EvalPlan]) -> tuple[list[Sample], list[Tally]]:
        """Returns all samples, and their sums by data set.

        Raises FailedPrecondition where the function fails or lacks a data set, InvalidArgument for its numbers.
        """
        by_name = {plan.dataset.name: plan for plan in plans}
        args = HookArgs({**self._args, "eval_datasets": [_named(plan) for plan in plans]})
        report = await self._called(args, {name: key for name, plan in by_name.items() if (key := self._key(plan))})
        missing = [name for name in by_name if name not in report.data]
        if missing:
            raise FailedPrecondition(
                f"hook {self._path} returned nothing of {', '.join(missing)}, only of {sorted(report.data) or 'none'}",
                reason="EVALUATION_FAILED",
            )
        log.info("eval_function_returned", hook=self._path, metrics=report.metrics)
        return self._evaluated(report, by_name)

    def _key(self, plan: EvalPlan) -> str | None:
        key: str | None = plan.dataset.reward_key or self._args.get("eval_reward_key") or self._args.get("reward_key")
        return key

    async def _called(self, args: HookArgs, reward_keys: Mapping[str, str]) -> EvalReport:
        work = (args, self._weights.policy_version, self._params.for_engine(), reward_keys)
        try:
            report: EvalReport = await self._function.call(run_eval_rollout, *work)
        except (WorkerError, HeadraceError) as error:
            failure = call_failure(error)
            raise FailedPrecondition(failure.message, reason="EVALUATION_FAILED") from error
        return report

    def _evaluated(self, report: EvalReport, plans: Mapping[str, EvalPlan]) -> tuple[list[Sample], list[Tally]]:
        evaluation_id, samples, tallies = uuid.uuid4().hex[:8], list[Sample](), list[Tally]()
        for name, rows in report.data.items():
            plan = plans.get(require_name(name, "datasets.name"))
            pass_reward = plan.pass_reward if plan else PASS_REWARD
            tally = Tally(name, max(map(len, rows), default=1), pass_reward)
            for row, made in enumerate(rows):
                for index, each in enumerate(made):
                    sample = self._stored(f"eval-{evaluation_id}/{name}/{row}", index, each)
                    tally.add(row, sample)
                    samples.append(sample)
            tallies.append(tally)
        return samples, tallies

    def _stored(self, group_id: str, index: int, made: HookSample) -> Sample:
        length = made.response_length
        sample = from_hook(
            made,
            sample_id=f"{group_id}/{index}",
            group_id=group_id,
            index=index,
            policy_ranges=(PolicyRange(self._oldest(made), 0, length),) if length else (),
        )
        return with_reward(sample, made, self._args, f"hook {self._path}")

    def _oldest(self, made: HookSample) -> int:
        """The policy version of a sample; names of weights begin with it."""
        numbers = [name.partition(".")[0] for name in made.weight_versions]
        known = [whole_number(number, MAX_COUNTER) for number in numbers]
        return min(number for number in (*known, self._weights.policy_version) if number is not None)


def _named(plan: EvalPlan) -> EvalDataset:
    asked = plan.dataset
    return EvalDataset(
        name=asked.name,
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
