"""Builds the rollout service from a job: engines, router, producers, evaluation, publication."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.client.open import Buffer
from headrace.errors import ConfigError
from headrace.hooks import HookArgs, hook_args
from headrace.job.eval_sets import eval_sets, own_functions
from headrace.job.rules.training import mask_tokens
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit, EvalSection, RolloutSection
from headrace.job_buffer import buffer_of
from headrace.limits import MAX_COUNTER
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.rpc.server import Listen
from headrace.run_folder import RunFolder
from headrace.trajectory import ModelBounds
from services.rollout.adapters import NamedAdapters
from services.rollout.admission import EngineSlots, GroupsLimit, Kind, LoadWatch, Shares
from services.rollout.agents.build import OpenaiParts, openai_parts
from services.rollout.agents.hosts import AgentHosts
from services.rollout.agents.sampler import AgentSampler
from services.rollout.chat.images import image_reader
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.engine.process import EngineFactory
from services.rollout.engine.scaling import Scaler
from services.rollout.engine.weights import ServedWeights
from services.rollout.engine_memory import EngineMemory
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.function import EvalFunction
from services.rollout.evaluation.runner import SAMPLES_AT_ONCE, EvalRunner
from services.rollout.fleet_build import EngineParts, capacity, engine_parts, joined_parts
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import StopStrings, request_ender
from services.rollout.production.groups import GroupSampler, Teacher, UntrainedSamples
from services.rollout.production.hooks import (
    AllSamples,
    CustomGenerateSampler,
    GroupFilter,
    OwnFunctions,
    PreScoreHooks,
    WithPreScoreHooks,
    custom_args,
)
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import STREAM, BufferLedger, Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, Sampler, job_params
from services.rollout.production.supervised import SupervisedParts, supervised_parts
from services.rollout.publication.receiver import Receiver
from services.rollout.rollout_function import LeasedGroups, StepSampler
from services.rollout.scoring import SampleScorer
from services.rollout.service import RolloutParts, RolloutService, Runs, Startable

_SHARES_OF_AN_ENGINE = 4
"""The least number of parts of a step at an engine, where there are enough samples: one more or less matters less."""
_TRAINING_SHARE = 8
"""The number of samples that training has in flight for each sample of an evaluation and each request of a client."""


def groups_at_once(rollout: RolloutSection) -> int:
    """Returns the most groups that are worked on at once."""
    groups_per_step = rollout.over_sampling_batch_size or rollout.rollout_batch_size or 1
    return rollout.max_groups_in_flight or 2 * groups_per_step


def samples_of(rollout: RolloutSection, groups: int) -> int:
    """Returns the number of samples in `groups` groups."""
    return groups * (rollout.n_samples_per_prompt or 1)


def samples_at_once(rollout: RolloutSection) -> int:
    """Returns training's most samples in flight."""
    return samples_of(rollout, groups_at_once(rollout))


def samples_together(rollout: RolloutSection, num_engines: int) -> int:
    """Returns how many samples of a prompt go to one of all services' engines, whose prefix cache they share.

    All of them, and fewer where a step has too few prompts to keep every engine as busy as the others.
    """
    samples = samples_of(rollout, rollout.rollout_batch_size or 1)
    return max(1, min(rollout.n_samples_per_prompt or 1, samples // (_SHARES_OF_AN_ENGINE * num_engines)))


MAX_WAITING_REQUESTS = 256
"""Requests of clients that may wait for an engine; more are refused, and told to come again."""


def evaluated_beside_training(rollout: RolloutSection, evaluation: EvalSection) -> int:
    """Evaluation's samples in flight beside training's, which does not go first where it waits for the evaluation."""
    if evaluation.eval_samples_in_flight is not None:
        return evaluation.eval_samples_in_flight
    if evaluation.eval_exact_version:
        return SAMPLES_AT_ONCE
    return max(1, samples_at_once(rollout) // _TRAINING_SHARE)


def requested_beside_training(rollout: RolloutSection) -> int:
    """Clients' requests in flight beside training's samples."""
    return max(1, samples_at_once(rollout) // _TRAINING_SHARE)


def engine_slots(rollout: RolloutSection, evaluation: EvalSection) -> EngineSlots:
    """Returns the slots of all kinds of requests."""
    slots = {
        Kind.TRAINING: samples_at_once(rollout),
        Kind.EVALUATION: evaluated_beside_training(rollout, evaluation),
        Kind.CLIENTS: requested_beside_training(rollout),
    }
    return EngineSlots(Shares(slots, alone=SAMPLES_AT_ONCE), max_waiting=MAX_WAITING_REQUESTS)


_ANSWER_SECONDS = 1.0
"""A call for fewer groups than a step's begins when the ledger has had none for so long."""


def step_function(
    job: Job,
    args: HookArgs,
    engines: EngineParts,
    buffer: Buffer,
    metrics: RolloutMetrics,
    warn: Callable[[str], None],
) -> StepSampler | None:
    """Returns None for a job without a rollout function."""
    path = job.rollout.rollout_function_path
    if path is None:
        return None
    groups_per_step = job.rollout.rollout_batch_size or 1

    async def next_step() -> int:
        stats = await buffer.stats(STREAM)
        return stats.step + stats.groups["READY"] // groups_per_step

    return StepSampler(
        path,
        args,
        engines.weights,
        LeasedGroups(groups_at_once(job.rollout)),
        job_params(job.rollout),
        next_step,
        groups_per_step=groups_per_step,
        seconds=job.rollout.rollout_timeout_seconds,
        activity=engines.fleet.activity,
        warn=warn,
        ended=metrics.background_work_ended,
    )


def eval_function(job: Job, args: HookArgs, weights: ServedWeights) -> EvalFunction | None:
    """Returns None where headrace evaluates by itself, as with a rollout function that does not."""
    path, is_own = job.eval.eval_function_path, True
    if path is None:
        path, is_own = job.rollout.rollout_function_path, False
    if path is None:
        return None
    params = job_params(job.rollout)
    return EvalFunction(path, args, weights, params, seconds=job.rollout.rollout_timeout_seconds, must_evaluate=is_own)


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
    host: _Build | None = None
    """What the service itself was built from, for a run that joins it."""

    def __post_init__(self) -> None:
        job = self.job
        self.warnings: list[str] = []
        self.params = job_params(job.rollout)
        self.seconds = job.rollout.generate_timeout_seconds
        self.args = hook_args(job)
        self.slots = engine_slots(job.rollout, job.eval)
        self.run = job.run.run_name
        self.metrics: RolloutMetrics = (
            self.host.metrics.of_joined(self.run) if self.host else RolloutMetrics(self.registry, self.run)
        )
        self.architecture = read_architecture(job.model.hf_checkpoint)
        self.encoder = prompt_encoder(job)
        end = StopStrings.of(self.encoder, job.model.hf_checkpoint)
        if self.host is None:
            most = job.services.rollout_run_requests
            alone = sys.maxsize if most is None else most
            self.turns = EngineSlots(Shares({self.run: samples_at_once(job.rollout)}, alone=alone, most=most))
            self.engines = engine_parts(
                job, self.factory, self.log_dir, self.metrics, self.architecture, end, self.turn
            )
        else:
            self.turns = self.host.turns
            self.engines = joined_parts(job, self.host.engines, self.run, self.architecture, end, self.turn)
        self.fleet = self.engines.fleet
        self.buffer = buffer_of(job.services)
        self.warn = self.warnings.append
        self.of_prompts: OwnFunctions | None = None

    def turn(self, seconds: float) -> AbstractAsyncContextManager[None]:
        """Of one request among those of all runs; the only one that there may be has no need to wait."""
        is_only = self.host is None and self.job.services.rollout_runs == 1
        return nullcontext() if is_only else self.turns.slot(self.run, seconds=seconds)

    def joined(self, job: Job) -> RolloutService:
        """The part of another run, on the same engines. What engines are is this service's to say."""
        own = self.job
        section = {"rollout_external_engine_addrs": (), "offload_rollout": None, "offload_train": None}
        theirs = job.model_copy(
            update={
                "placement": own.placement.model_copy(update=section),
                "sglang": own.sglang,
                "model": job.model.model_copy(update={"hf_checkpoint": own.model.hf_checkpoint}),
            }
        )
        build = _Build(
            theirs, self.factory, self.log_dir, self.registry, None, None, self.has_accelerator, self.listen, self
        )
        return build.service()

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
            mask_tokens=mask_tokens(job),
            evaluation_priority=evaluation_priority(job.sglang),
            samples_together=samples_together(job.rollout, all_engines),
        )
        of_job: Sampler = self.custom or self.agents or alone
        of_sets = own_functions(eval_sets(job.eval))
        has_source = job.data.data_source_path is not None
        if has_source or of_sets:  # prompts may name functions of their own
            of_job = self.of_prompts = OwnFunctions(of_job, self.hook_sampler, of_sets, any_path=has_source)
        return self.hooked(of_job)

    @cached_property
    def custom(self) -> CustomGenerateSampler | None:
        path = self.job.rollout.custom_generate_function_path
        return self.hook_sampler(path) if path else None

    def hook_sampler(self, path: str) -> CustomGenerateSampler:
        return CustomGenerateSampler(
            path,
            self._custom_args,
            self.engines.weights,
            seconds=self.job.rollout.generate_timeout_seconds,
            calls_at_once=self._calls_at_once,
            per_sample=self.job.rollout.generate_per_sample,
            activity=self.fleet.activity,
            warn=self.warn,
            encoder=self.encoder,
        )

    @cached_property
    def openai(self) -> OpenaiParts | None:
        return openai_parts(
            self.job,
            self.args,
            self.engines.generator,
            self.encoder,
            self.params,
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
    def sample_hooks(self) -> PreScoreHooks | None:
        return PreScoreHooks.of(self.job.rollout, self.args)

    def hooked(self, sampler: Sampler) -> Sampler:
        return WithPreScoreHooks(sampler, self.sample_hooks) if self.sample_hooks else sampler

    @cached_property
    def steps(self) -> StepSampler | None:
        """The user's function that samples whole steps."""
        return step_function(self.job, self._custom_args, self.engines, self.buffer, self.metrics, self.warn)

    @cached_property
    def by_function(self) -> EvalFunction | None:
        """The user's function that evaluates."""
        return eval_function(self.job, self._custom_args, self.engines.weights)

    @property
    def _custom_args(self) -> HookArgs:
        return custom_args(self.args, self.engines.router.url)

    @property
    def _calls_at_once(self) -> int:
        return samples_at_once(self.job.rollout) + SAMPLES_AT_ONCE

    def service(self) -> RolloutService:
        job, openai, supervised = self.job, self.openai, self.supervised
        adapts = job.rollout.adapt_groups_in_flight and not supervised
        return RolloutService(
            self.parts(),
            self.engines.router if job.asks_engines and self.host is None else None,
            self.engines.client,
            self.buffer,
            custom=self.started_functions(),
            endpoint=openai.server if openai else None,
            group_filter=self.group_filter,
            teacher=self.teacher,
            conversations=supervised.encoder if supervised else None,
            load_watch=self.load_watch() if adapts else None,
            is_joined=self.host is not None,
        )

    def parts(self) -> RolloutParts:
        """The parts that the servicer calls."""
        job, fleet, producer, agents = self.job, self.fleet, self.producer, self.agents
        weights_root = RunFolder.of(job).weights_of(job.publish)
        receiver = Receiver(fleet, weights_root, self.run if self.host else "")
        serves_adapters = job.publish.update_weight_transport == "adapter" and not self.host
        self.metrics.watch_requests(self.slots.shares, lambda: producer.max_groups_in_flight)
        return RolloutParts(
            encoder=self.encoder,
            generator=self.engines.generator,
            sampler=self.steps or self.sampler,
            scorer=self.scorer,
            evaluator=self.evaluator(),
            fleet=fleet,
            weights=self.engines.weights,
            scaler=self.scaler,
            runs=None if self.host else self.runs(),
            receiver=receiver,
            producer=producer,
            engine_memory=EngineMemory(fleet, producer, receiver) if job.placement.offload_rollout else None,
            metrics=self.metrics,
            slots=self.slots,
            params=self.params,
            generate_seconds=self.seconds,
            router_url=self.engines.router.url if job.asks_engines else None,
            agent_hosts=agents.player if agents and isinstance(agents.player, AgentHosts) else None,
            warnings=self.warnings,
            router=self.engines.client,
            adapters=NamedAdapters(weights_root if serves_adapters else None, fleet),
        )

    @cached_property
    def scaler(self) -> Scaler:
        """One for all runs on the engines."""
        if self.host:
            return self.host.scaler
        return Scaler(self.fleet, capacity(self.job, has_accelerator=self.has_accelerator), self.metrics)

    def runs(self) -> Runs:
        """The other runs, whose parts are built as this one's is."""
        slots = samples_at_once(self.job.rollout)
        return Runs(self.job, self.joined, self.turns, slots, self.metrics.background_work_ended)

    def started_functions(self) -> list[Startable]:
        """The parts that have processes."""
        some: Sequence[Startable | None] = (
            self.custom,
            self.agents,
            self.steps,
            self.by_function,
            self.all_samples,
            self.sample_hooks,
            self.of_prompts,
            self.openai.tool_calls if self.openai else None,
        )
        return [each for each in some if each]

    @cached_property
    def producer(self) -> Producer:
        ledger = BufferLedger(self.buffer, STREAM)
        if self.steps:
            ledger = BufferLedger(
                self.buffer, STREAM, wait_seconds=_ANSWER_SECONDS, answered=self.steps.groups.answered
            )
        return Producer(
            ledger,
            self.groups(),
            (lambda: self.engines.weights.policy_version) if self.job.asks_engines else (lambda: MAX_COUNTER),
            self.metrics,
            max_groups_in_flight=groups_at_once(self.job.rollout),
            interrupt=None if self.host else self.fleet.interrupt,
            end_requests=None if self.host else request_ender(lambda: self.fleet.engines),
        )

    def groups(self) -> GroupSampler:
        job, supervised = self.job, self.supervised
        return GroupSampler(
            supervised.encoder if supervised else self.encoder,
            supervised.sampler if supervised else self.steps or self.sampler,
            None if supervised else self.scorer,
            self.params,
            rollout_seed=job.data.rollout_seed,
            max_prompt_tokens=job.rollout.rollout_max_prompt_len,
            context=_context(job, self.architecture),
            group_filter=self.group_filter,
            partial_rollout=_partial_rollout(job),
            teacher=self.teacher,
            bounds=ModelBounds.of(self.architecture),
            untrained_samples=UntrainedSamples.of(job.tracking, self.samples_dir, self.number),
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
            _required(address, "reward_address") if self.job.scores else address,
            item_seconds=self.job.reward.reward_timeout_seconds,
            patience_seconds=self.job.reward.reward_patience_seconds,
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

    def evaluator(self) -> EvalRunner:
        job = self.job
        return EvalRunner(
            self.encoder,
            self.sampler,
            self.scorer,
            self.params,
            seed=job.data.rollout_seed,
            files=EvalFiles.of(job.eval, job.buffer.prompt_root),
            slots=self.slots,
            scores_groups=job.reward.group_rm,
            function=self.by_function,
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


def job_for_replica(job: Job, number: int | None) -> Job:
    """Returns the job with this service's share of external engines and of groups, and a port of its own for agents.

    None: it is the only one.
    """
    if number is None:
        return job
    addresses, port = job.placement.rollout_external_engine_addrs, job.rollout.openai_port
    each = len(addresses) // job.services.num_rollout_services
    share = addresses[number * each : (number + 1) * each]
    rollout = {
        "openai_port": None if port is None else port + number,
        "max_groups_in_flight": job.rollout.max_groups_in_flight or _groups_at_once(job),
    }
    return job.model_copy(
        update={
            "placement": job.placement.model_copy(update={"rollout_external_engine_addrs": share}),
            "rollout": job.rollout.model_copy(update=rollout),
        }
    )


def _groups_at_once(job: Job) -> int:
    """Services share a step where they are on-policy, so that all have work from its beginning; else two steps."""
    groups_per_step = job.rollout.over_sampling_batch_size or job.rollout.rollout_batch_size or 1
    groups = 2 * groups_per_step if job.buffer.max_staleness else groups_per_step
    return math.ceil(groups / job.services.num_rollout_services)
