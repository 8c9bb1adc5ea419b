"""Builds from a job what samples its prompts: engines alone, a user's function, or agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from headrace.client.port import Buffer
from headrace.hooks import HookArgs
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.rpc.listen import Listen
from services.rollout.admission.engine_slots import EngineSlots
from services.rollout.agents.build import OpenaiParts, openai_parts
from services.rollout.agents.sampler import AgentSampler
from services.rollout.chat.images import image_reader
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.evaluation.eval_function import EvalFunction
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE
from services.rollout.fleet_build import EngineParts
from services.rollout.in_flight import samples_at_once, samples_together
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.hooks.custom import HookSampler, OwnFunctions, custom_args
from services.rollout.production.hooks.sample_hooks import HookedSampler, SampleHooks
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, Sampler, job_params
from services.rollout.rollout_function.build import StepFunction, eval_function, step_function


def prompt_encoder(job: Job) -> PromptEncoder:
    """Returns the job's encoder, which reads its files when it is first used."""
    model, data = job.model, job.data
    return PromptEncoder(
        model.hf_checkpoint,
        apply_chat_template=data.apply_chat_template,
        variables=data.apply_chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
        images=image_reader(model.hf_checkpoint, data, job.eval, job.buffer.prompt_root),
    )


@dataclass
class SamplerBuild:
    """Builds each part once, when another part first needs it. `warn` is called with what people should know."""

    job: Job
    args: HookArgs
    encoder: PromptEncoder
    engines: EngineParts
    architecture: Architecture
    buffer: Buffer
    slots: EngineSlots
    metrics: RolloutMetrics
    listen: Listen
    warn: Callable[[str], None]
    of_prompts: OwnFunctions | None = None

    @cached_property
    def sampler(self) -> Sampler:
        """The user's function, or the job's agents, or the engines alone."""
        job = self.job
        all_engines = job.services.num_rollout_services * job.placement.num_engines
        alone = EngineSampler(
            self.engines.generator,
            self.encoder,
            seconds=job.rollout.generate_timeout_seconds,
            num_layers=self.architecture.num_layers if job.train.use_rollout_routing_replay else None,
            evaluation_priority=evaluation_priority(job.sglang),
            samples_together=samples_together(job.rollout, all_engines),
        )
        of_job = self.custom or self.agents or alone
        return self.hooked(self.own_functions(of_job) if job.data.data_source_path else of_job)

    def own_functions(self, sampler: Sampler) -> OwnFunctions:
        """A data source's samples may name functions of their own."""
        self.of_prompts = OwnFunctions(sampler, self.hook_sampler)
        return self.of_prompts

    @cached_property
    def custom(self) -> HookSampler | None:
        path = self.job.rollout.custom_generate_function_path
        return self.hook_sampler(path) if path else None

    @cached_property
    def of_data_sets(self) -> Mapping[str, HookSampler]:
        """Evaluation functions of data sets, by path."""
        functions = {each.custom_generate_function_path for each in eval_sets(self.job.eval)}
        return {path: self.hook_sampler(path) for path in sorted(filter(None, functions))}

    def hook_sampler(self, path: str) -> HookSampler:
        return HookSampler(
            path,
            self._custom_args,
            self.engines.fleet.weights,
            seconds=self.job.rollout.generate_timeout_seconds,
            calls_at_once=self._calls_at_once,
            per_sample=self.job.rollout.generate_per_sample,
            activity=self.engines.fleet.activity,
            warn=self.warn,
            encoder=self.encoder,
        )

    @cached_property
    def openai(self) -> OpenaiParts | None:
        params = job_params(self.job.rollout)
        return openai_parts(
            self.job,
            self.args,
            self.engines.generator,
            self.encoder,
            params,
            self.architecture,
            listen=self.listen,
            slots=self.slots,
            calls_at_once=self._calls_at_once,
            warn=self.warn,
            ended=self.metrics.background_work_ended,
        )

    @property
    def agents(self) -> AgentSampler | None:
        return self.openai.sampler if self.openai else None

    @cached_property
    def sample_hooks(self) -> SampleHooks | None:
        return SampleHooks.of(self.job.rollout, self.args)

    def hooked(self, sampler: Sampler) -> Sampler:
        return HookedSampler(sampler, self.sample_hooks) if self.sample_hooks else sampler

    @cached_property
    def steps(self) -> StepFunction | None:
        """The user's function that samples whole steps."""
        return step_function(self.job, self._custom_args, self.engines.fleet, self.buffer, self.metrics, self.warn)

    @cached_property
    def by_function(self) -> EvalFunction | None:
        """The user's function that evaluates."""
        return eval_function(self.job, self._custom_args, self.engines.fleet.weights)

    @property
    def _custom_args(self) -> HookArgs:
        return custom_args(self.args, self.engines.router.url)

    @property
    def _calls_at_once(self) -> int:
        return samples_at_once(self.job.rollout) + SAMPLES_AT_ONCE
