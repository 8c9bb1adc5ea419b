"""Builds the rollout service from a job: engines, router, producers, evaluation, publication."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.errors import ConfigError
from headrace.hooks import hook_args
from headrace.job.eval_sets import eval_sets
from headrace.job.model.context_limit import ContextLimit
from headrace.job.schema.job import Job
from headrace.job_buffer import buffer_of
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.process.openmp import threads_of_each
from headrace.process.scratch import delete_leftovers
from headrace.rpc.net import Address
from headrace.run_folder import RunFolder
from headrace.sample_checks import ModelBounds
from services.rollout.agents.build import openai_parts
from services.rollout.agents.hosts import AgentHosts
from services.rollout.engine.arguments import EngineOptions, evaluation_priority
from services.rollout.engine.client import EngineClient
from services.rollout.engine.external import ExternalEngine
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory, SglangProcess
from services.rollout.engine.routing.router import Router
from services.rollout.evaluation.eval_file import EvalFiles
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE, Evaluator
from services.rollout.evaluation.evaluation_slots import EvaluationSlots
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.custom import HookSampler, custom_args
from services.rollout.production.failed_samples import FailedSamples
from services.rollout.production.filter import GroupFilter
from services.rollout.production.generator import Generator
from services.rollout.production.groups import GroupSampler
from services.rollout.production.ledger import BufferLedger
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, Sampler, job_params
from services.rollout.production.supervised import supervised_parts
from services.rollout.production.teacher import Teacher
from services.rollout.publication.receiver import Receiver
from services.rollout.scoring import SampleScorer
from services.rollout.service import RolloutParts, RolloutService

_STREAM = "train"
_EVALUATION_SHARE = 8
"""Training has so many samples in flight for each sample of an evaluation."""


def rollout_service(
    job: Job, factory: EngineFactory, log_dir: Path, registry: CollectorRegistry, samples_dir: Path | None = None
) -> RolloutService:
    """Starts nothing. Raises ConfigError when the job names no buffer or no reward service."""
    seconds = job.rollout.generate_timeout_seconds
    params, seed = job_params(job.rollout), job.data.rollout_seed
    encoder = PromptEncoder(
        job.model.hf_checkpoint,
        apply_chat_template=job.data.apply_chat_template,
        variables=job.data.apply_chat_template_kwargs,
    )
    metrics = RolloutMetrics(registry)
    timing = FleetTiming.of(job.placement, start_seconds=job.services.start_timeout_seconds)
    router = Router(job.rollout.router_policy, log_dir / "router.log", request_seconds=seconds, timing=timing)
    asks_for_experts = job.train.use_rollout_routing_replay
    architecture = read_architecture(job.model.hf_checkpoint)
    router_client = EngineClient(router.url, routed_experts=asks_for_experts, vocab_size=architecture.vocab_size)
    buffer = buffer_of(job.services)
    fleet = Fleet(
        job.placement.num_engines,
        job.placement.rollout_num_gpus_per_engine,
        factory,
        router,
        timing,
        metrics,
        begins_with_checkpoint=not job.placement.rollout_external_engine_addrs,
    )
    generator = Generator(
        router_client,
        fleet.weights,
        fleet.suspect,
        context=ContextLimit.of_engines(job.sglang, architecture),
        activity=fleet.activity,
    )
    hook, args = job.rollout.custom_generate_function_path, hook_args(job)
    warnings: list[str] = []

    def hook_sampler(path: str) -> HookSampler:
        return HookSampler(
            path,
            custom_args(args, router.url),
            fleet.weights,
            seconds=seconds,
            calls_at_once=_samples_at_once(job) + SAMPLES_AT_ONCE,
            per_sample=job.rollout.generate_per_sample,
            activity=fleet.activity,
            warn=warnings.append,
        )

    custom = hook_sampler(hook) if hook else None
    functions = {each.custom_generate_function_path for each in eval_sets(job.eval)} - {None}
    of_data_sets = {path: hook_sampler(path) for path in sorted(filter(None, functions))}
    openai = openai_parts(
        *(job, args, generator, encoder, params, architecture),
        calls_at_once=_samples_at_once(job) + SAMPLES_AT_ONCE,
        warn=warnings.append,
        ended=metrics.background_work_ended,
    )
    num_layers = architecture.num_layers if asks_for_experts else None
    agents = openai.sampler if openai else None
    sampler: Sampler = (
        custom
        or agents
        or EngineSampler(
            generator,
            encoder,
            seconds=seconds,
            num_layers=num_layers,
            evaluation_priority=evaluation_priority(job.sglang),
        )
    )
    group_filter = GroupFilter.of(job.rollout, args)
    teacher = Teacher.of(job.distillation, call_seconds=seconds)
    scorer = SampleScorer(
        _required(job.services.reward_address, "reward_address"),
        item_seconds=job.reward.reward_timeout_seconds,
        patience_seconds=job.services.peer_wait_seconds,
    )
    supervised = supervised_parts(job.train, job.model.hf_checkpoint, job.data.apply_chat_template_kwargs)
    groups = GroupSampler(
        supervised.encoder if supervised else encoder,
        supervised.sampler if supervised else sampler,
        None if supervised else scorer,
        params,
        rollout_seed=seed,
        max_prompt_tokens=job.rollout.rollout_max_prompt_len,
        context=_context(job, architecture),
        group_filter=group_filter,
        partial_rollout=_partial_rollout(job),
        teacher=teacher,
        bounds=ModelBounds.of(architecture),
        failed_samples=FailedSamples.of(job.tracking, samples_dir),
    )
    producer = Producer(
        BufferLedger(buffer, _STREAM),
        groups,
        lambda: fleet.policy_version,
        metrics,
        max_groups_in_flight=_groups_at_once(job),
        interrupt=fleet.interrupt,
    )
    parts = RolloutParts(
        encoder=encoder,
        generator=generator,
        sampler=sampler,
        scorer=scorer,
        evaluator=Evaluator(
            *(encoder, sampler, scorer, params),
            seed=seed,
            files=_eval_files(job),
            slots=EvaluationSlots(sampler, beside=evaluated_beside_training(job), alone=SAMPLES_AT_ONCE),
            scores_groups=job.reward.group_rm,
            samplers=of_data_sets,
        ),
        fleet=fleet,
        receiver=Receiver(fleet, RunFolder(job.run.run_dir / job.run.run_name).weights_of(job.publish)),
        producer=producer,
        metrics=metrics,
        params=params,
        generate_seconds=seconds,
        router_url=router.url,
        agent_hosts=agents.player if agents and isinstance(agents.player, AgentHosts) else None,
        warnings=warnings,
    )
    return RolloutService(
        *(parts, router, router_client, buffer),
        custom=[
            *([custom] if custom else []),
            *of_data_sets.values(),
            *([agents] if agents else []),
            *([openai.tool_calls] if openai else []),
        ],
        endpoint=openai.server if openai else None,
        group_filter=group_filter,
        teacher=teacher,
        conversations=supervised.encoder if supervised else None,
    )


def sglang_factory(job: Job, log_dir: Path, *, has_accelerator: bool) -> EngineFactory:
    """Makes real engines, or finds those that the job has addresses of.

    Their start raises ConfigError for --sglang-* flags that SGLang does not know.
    """
    delete_leftovers(log_dir, "engine-*")
    if addresses := [Address.parse(text) for text in job.placement.rollout_external_engine_addrs]:
        size = job.placement.rollout_num_gpus_per_engine
        return lambda number: ExternalEngine(addresses[number], size)
    options = engine_options(job)
    return lambda number: SglangProcess(
        options, number, log_dir / f"engine-{number}.log", has_accelerator=has_accelerator
    )


def engine_options(job: Job) -> EngineOptions:
    """On-policy, engines use all cores while the trainer waits; otherwise they leave half of them to it."""
    share = 0.5 if job.buffer.max_staleness else 1.0
    return EngineOptions(
        hf_checkpoint=job.model.hf_checkpoint,
        tensor_parallel_size=job.placement.rollout_num_gpus_per_engine,
        seed=job.data.rollout_seed,
        sglang=job.sglang,
        threads=threads_of_each(job.placement.rollout_num_gpus, share=share),
        returns_experts=job.train.use_rollout_routing_replay,
    )


def _eval_files(job: Job) -> EvalFiles:
    return EvalFiles([each.path for each in eval_sets(job.eval)], job.buffer.prompt_root)


def evaluated_beside_training(job: Job) -> int:
    """Evaluation's samples in flight beside training's, which does not go first where it waits for the evaluation."""
    if job.eval.eval_samples_in_flight is not None:
        return job.eval.eval_samples_in_flight
    if job.eval.eval_exact_version:
        return SAMPLES_AT_ONCE
    return max(1, _samples_at_once(job) // _EVALUATION_SHARE)


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
    return ContextLimit.of(job.rollout, job.sglang, architecture)


def _groups_at_once(job: Job) -> int:
    groups_per_step = job.rollout.over_sampling_batch_size or job.rollout.rollout_batch_size or 1
    return job.rollout.max_groups_in_flight or 2 * groups_per_step


def _samples_at_once(job: Job) -> int:
    return _groups_at_once(job) * (job.rollout.n_samples_per_prompt or 1)


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise ConfigError(f"services.{name} is not set: the rollout service needs it", field=f"services.{name}")
    return value
