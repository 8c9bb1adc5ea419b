"""Builds the rollout service from a job: engines, router, producers, evaluation, publication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.errors import ConfigError
from headrace.hooks import hook_args
from headrace.job.model.context_limit import ContextLimit
from headrace.job.schema.job import Job
from headrace.job_buffer import buffer_of
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.rpc.listen import Listen
from headrace.run_folder import RunFolder
from headrace.sample_checks import ModelBounds
from headrace.wire.limits import MAX_COUNTER
from services.rollout.admission.groups_limit import GroupsLimit
from services.rollout.admission.load_watch import LoadWatch
from services.rollout.admission.shares import Kind
from services.rollout.agents.hosts import AgentHosts
from services.rollout.devices.turn import EngineTurn
from services.rollout.engine.process import EngineFactory
from services.rollout.engine.scaling.scaler import Scaler
from services.rollout.evaluation.eval_file import EvalFiles
from services.rollout.evaluation.evaluate import Evaluator
from services.rollout.fleet_build import capacity, engine_parts
from services.rollout.in_flight import engine_slots, groups_at_once, samples_of
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.failed_samples import FailedSamples
from services.rollout.production.groups import GroupSampler
from services.rollout.production.hooks.all_samples import AllSamples
from services.rollout.production.hooks.filter import GroupFilter
from services.rollout.production.ledger import STREAM, BufferLedger
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import Producer
from services.rollout.production.response_end import ResponseEnd
from services.rollout.production.sampling import job_params
from services.rollout.production.supervised import SupervisedParts, supervised_parts
from services.rollout.production.teacher import Teacher
from services.rollout.publication.receiver import Receiver
from services.rollout.sampler_build import SamplerBuild, prompt_encoder
from services.rollout.scoring import SampleScorer
from services.rollout.service import RolloutParts, RolloutService, StartedFunctions

_LOOPBACK = Listen("127.0.0.1:0")


def rollout_service(
    job: Job,
    factory: EngineFactory,
    log_dir: Path,
    registry: CollectorRegistry,
    samples_dir: Path | None = None,
    number: int | None = None,
    *,
    has_accelerator: bool = False,
    listen: Listen = _LOOPBACK,
) -> RolloutService:
    """Starts nothing. `number` is that of one of several services; `listen` says who may ask the OpenAI endpoint.

    Raises ConfigError when the job names no buffer or no reward service.
    """
    build = _Build(job, factory, log_dir, registry, samples_dir, number, has_accelerator, listen)
    return build.service()


@dataclass
class _Build:
    """Builds each part of a service once, when another part first needs it."""

    job: Job
    factory: EngineFactory
    log_dir: Path
    registry: CollectorRegistry
    samples_dir: Path | None
    number: int | None
    has_accelerator: bool
    listen: Listen

    def __post_init__(self) -> None:
        job = self.job
        self.warnings: list[str] = []
        self.params = job_params(job.rollout)
        self.seconds = job.rollout.generate_timeout_seconds
        self.args = hook_args(job)
        self.slots = engine_slots(job.rollout, job.eval)
        self.metrics = RolloutMetrics(self.registry)
        self.architecture = read_architecture(job.model.hf_checkpoint)
        encoder = prompt_encoder(job)
        end = ResponseEnd.of(encoder, job.model.hf_checkpoint)
        self.engines = engine_parts(job, self.factory, self.log_dir, self.metrics, self.architecture, end)
        self.fleet = self.engines.fleet
        self.buffer = buffer_of(job.services)
        self.samplers = SamplerBuild(
            job,
            self.args,
            encoder,
            self.engines,
            self.architecture,
            self.buffer,
            self.slots,
            self.metrics,
            listen=self.listen,
            warn=self.warnings.append,
        )

    def service(self) -> RolloutService:
        job, openai, supervised = self.job, self.samplers.openai, self.supervised
        adapts = job.rollout.adapt_groups_in_flight and not supervised
        return RolloutService(
            self.parts(),
            self.engines.router if job.asks_engines else None,
            self.engines.client,
            self.buffer,
            custom=self.started_functions(),
            endpoint=openai.server if openai else None,
            group_filter=self.group_filter,
            teacher=self.teacher,
            conversations=supervised.encoder if supervised else None,
            load_watch=self.load_watch() if adapts else None,
        )

    def parts(self) -> RolloutParts:
        """The parts that the servicer calls."""
        job, fleet, producer, samplers = self.job, self.fleet, self.producer, self.samplers
        agents = samplers.agents
        receiver = Receiver(fleet, RunFolder.of(job).weights_of(job.publish))
        self.metrics.watch_requests(self.slots.shares, lambda: producer.max_groups_in_flight)
        return RolloutParts(
            encoder=samplers.encoder,
            generator=self.engines.generator,
            sampler=samplers.steps.sampler if samplers.steps else samplers.sampler,
            scorer=self.scorer,
            evaluator=self.evaluator(),
            fleet=fleet,
            scaler=Scaler(fleet, capacity(job, has_accelerator=self.has_accelerator), self.metrics),
            receiver=receiver,
            producer=producer,
            turn=EngineTurn(fleet, producer, receiver) if job.placement.offload_rollout else None,
            metrics=self.metrics,
            slots=self.slots,
            params=self.params,
            generate_seconds=self.seconds,
            router_url=self.engines.router.url if job.asks_engines else None,
            agent_hosts=agents.player if agents and isinstance(agents.player, AgentHosts) else None,
            warnings=self.warnings,
        )

    def started_functions(self) -> list[StartedFunctions]:
        """The parts that have processes."""
        of = self.samplers
        of_steps, tool_calls = of.steps.sampler if of.steps else None, of.openai.tool_calls if of.openai else None
        some = (
            of.custom,
            of.agents,
            of_steps,
            of.by_function,
            self.all_samples,
            of.sample_hooks,
            of.of_prompts,
            tool_calls,
        )
        return [*(each for each in some if each), *of.of_data_sets.values()]

    @cached_property
    def producer(self) -> Producer:
        steps = self.samplers.steps
        return Producer(
            steps.ledger if steps else BufferLedger(self.buffer, STREAM),
            self.groups(),
            (lambda: self.fleet.policy_version) if self.job.asks_engines else (lambda: MAX_COUNTER),
            self.metrics,
            max_groups_in_flight=groups_at_once(self.job.rollout),
            interrupt=self.fleet.interrupt,
        )

    def groups(self) -> GroupSampler:
        job, supervised, samplers = self.job, self.supervised, self.samplers
        sampler = samplers.steps.sampler if samplers.steps else samplers.sampler
        return GroupSampler(
            supervised.encoder if supervised else samplers.encoder,
            supervised.sampler if supervised else sampler,
            None if supervised else self.scorer,
            self.params,
            rollout_seed=job.data.rollout_seed,
            max_prompt_tokens=job.rollout.rollout_max_prompt_len,
            context=_context(job, self.architecture),
            group_filter=self.group_filter,
            partial_rollout=_partial_rollout(job),
            teacher=self.teacher,
            bounds=ModelBounds.of(self.architecture),
            failed_samples=FailedSamples.of(job.tracking, self.samples_dir, self.number),
            slots=None if supervised else self.slots,
            all_samples=self.all_samples,
        )

    @cached_property
    def supervised(self) -> SupervisedParts | None:
        model = self.job.model
        return supervised_parts(
            self.job.train,
            model.hf_checkpoint,
            self.job.data.apply_chat_template_kwargs,
            trust_remote_code=model.trust_remote_code,
        )

    @cached_property
    def scorer(self) -> SampleScorer:
        address = self.job.services.reward_address
        return SampleScorer(
            _required(address, "reward_address") if self.job.asks_engines else address,
            item_seconds=self.job.reward.reward_timeout_seconds,
            patience_seconds=self.job.services.peer_wait_seconds,
        )

    @cached_property
    def group_filter(self) -> GroupFilter | None:
        return GroupFilter.of(self.job.rollout, self.args)

    @cached_property
    def all_samples(self) -> AllSamples | None:
        return AllSamples.of(self.job.rollout, self.args, self.metrics)

    @cached_property
    def teacher(self) -> Teacher | None:
        return Teacher.of(self.job.distillation, call_seconds=self.seconds)

    def load_watch(self) -> LoadWatch:
        """Fits the groups in flight to what the engines can do."""
        job, producer, slots = self.job, self.producer, self.slots

        def limit_groups(groups: int) -> None:
            producer.limit_groups(groups)
            slots.resize(Kind.TRAINING, samples_of(job.rollout, groups))

        return LoadWatch(
            lambda: self.fleet.engines,
            GroupsLimit(groups_at_once(job.rollout)),
            lambda: producer.groups_in_flight,
            limit_groups,
            self.metrics.background_work_ended,
        )

    def evaluator(self) -> Evaluator:
        job, samplers = self.job, self.samplers
        return Evaluator(
            samplers.encoder,
            samplers.sampler,
            self.scorer,
            self.params,
            seed=job.data.rollout_seed,
            files=EvalFiles.of(job.eval, job.buffer.prompt_root),
            slots=self.slots,
            scores_groups=job.reward.group_rm,
            samplers={path: samplers.hooked(each) for path, each in samplers.of_data_sets.items()},
            function=samplers.by_function,
        )


def _partial_rollout(job: Job) -> PartialRollout | None:
    if not job.rollout.partial_rollout:
        return None
    return PartialRollout(job.rollout.mask_offpolicy_in_partial_rollout, job.buffer.max_staleness)


def _context(job: Job, architecture: Architecture) -> ContextLimit | None:
    """The limit of a prompt and its response; None where only the job could set one, and it sets none.

    So it is with conversations that are given, and with a user's function, which may ask about something shorter than
    the prompt.
    """
    asks_engines = job.train.loss_mask_type is None and job.rollout.user_function is None
    if not asks_engines and job.rollout.rollout_max_context_len is None:
        return None
    return ContextLimit.of(job.rollout, job.sglang, architecture, job.placement.engine_groups)


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise ConfigError(f"services.{name} is not set: the rollout service needs it", field=f"services.{name}")
    return value
