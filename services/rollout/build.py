"""Builds the rollout service from a job: engines, router, producers, evaluation, publication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.errors import ConfigError
from headrace.hooks import HookArgs, hook_args
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
from services.rollout.agents.sampler import AgentSampler
from services.rollout.agents.server import EndpointServer
from services.rollout.agents.session import AgentPolicy, AgentSessions, SessionLimits
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import EngineOptions, evaluation_priority
from services.rollout.engine.client import EngineClient
from services.rollout.engine.external import ExternalEngine
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory, SglangProcess
from services.rollout.engine.routing.router import Router
from services.rollout.evaluation.eval_file import EvalFiles
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE, Evaluator
from services.rollout.evaluation.evaluation_slots import EvaluationSlots
from services.rollout.in_flight import evaluated_beside_training, groups_at_once, samples_at_once
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.all_samples import AllSamples
from services.rollout.production.custom import HookSampler, custom_args
from services.rollout.production.failed_samples import FailedSamples
from services.rollout.production.filter import GroupFilter
from services.rollout.production.generator import Generator
from services.rollout.production.groups import GroupSampler
from services.rollout.production.ledger import STREAM, BufferLedger
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, Sampler, job_params
from services.rollout.production.supervised import supervised_parts
from services.rollout.production.teacher import Teacher
from services.rollout.publication.receiver import Receiver
from services.rollout.rollout_function.build import eval_function, step_function
from services.rollout.scoring import SampleScorer
from services.rollout.service import RolloutParts, RolloutService


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
            calls_at_once=samples_at_once(job) + SAMPLES_AT_ONCE,
            per_sample=job.rollout.generate_per_sample,
            activity=fleet.activity,
            warn=warnings.append,
        )

    custom = hook_sampler(hook) if hook else None
    functions = {each.custom_generate_function_path for each in eval_sets(job.eval)} - {None}
    of_data_sets = {path: hook_sampler(path) for path in sorted(filter(None, functions))}
    openai = openai_parts(job, args, generator, encoder, params, architecture, warnings.append)
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
    steps = step_function(job, custom_args(args, router.url), fleet, buffer, metrics, warnings.append)
    by_function = eval_function(job, custom_args(args, router.url), fleet.weights)
    group_filter = GroupFilter.of(job.rollout, args)
    all_samples = AllSamples.of(job.rollout, args, metrics)
    teacher = Teacher.of(job.distillation, call_seconds=seconds)
    scorer = SampleScorer(
        _required(job.services.reward_address, "reward_address"),
        item_seconds=job.reward.reward_timeout_seconds,
        patience_seconds=job.services.peer_wait_seconds,
    )
    supervised = supervised_parts(job.train, job.model.hf_checkpoint, job.data.apply_chat_template_kwargs)
    groups = GroupSampler(
        supervised.encoder if supervised else encoder,
        supervised.sampler if supervised else steps.sampler if steps else sampler,
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
        all_samples=all_samples,
    )
    producer = Producer(
        steps.ledger if steps else BufferLedger(buffer, STREAM),
        groups,
        lambda: fleet.policy_version,
        metrics,
        max_groups_in_flight=groups_at_once(job),
        interrupt=fleet.interrupt,
    )
    parts = RolloutParts(
        encoder=encoder,
        generator=generator,
        sampler=steps.sampler if steps else sampler,
        scorer=scorer,
        evaluator=Evaluator(
            *(encoder, sampler, scorer, params),
            seed=seed,
            files=_eval_files(job),
            slots=EvaluationSlots(sampler, beside=evaluated_beside_training(job), alone=SAMPLES_AT_ONCE),
            scores_groups=job.reward.group_rm,
            samplers=of_data_sets,
            function=by_function,
        ),
        fleet=fleet,
        receiver=Receiver(fleet, RunFolder(job.run.run_dir / job.run.run_name).weights_of(job.publish)),
        producer=producer,
        metrics=metrics,
        params=params,
        generate_seconds=seconds,
        router_url=router.url,
        warnings=warnings,
    )
    return RolloutService(
        *(parts, router, router_client, buffer),
        custom=[
            *(each for each in (custom, agents, steps.sampler if steps else None, by_function, all_samples) if each),
            *of_data_sets.values(),
        ],
        endpoint=openai.server if openai else None,
        group_filter=group_filter,
        teacher=teacher,
        conversations=supervised.encoder if supervised else None,
    )


@dataclass(frozen=True, slots=True)
class OpenaiParts:
    """The endpoint of OpenAI's protocol, and the sampler of agents that use it, if the job has one."""

    server: EndpointServer
    sampler: AgentSampler | None


def openai_parts(
    job: Job,
    args: HookArgs,
    generator: Generator,
    encoder: PromptEncoder,
    params: SamplingParams,
    architecture: Architecture,
    warn: Callable[[str], None],
) -> OpenaiParts | None:
    """None unless the job has an agent or asks for the endpoint."""
    agent = job.rollout.agent_function_path
    if agent is None and job.rollout.openai_port is None:
        return None
    from services.rollout.agents.endpoint import Endpoint  # half a second: only where there is an endpoint

    seconds = job.rollout.generate_timeout_seconds
    sessions = AgentSessions(encoder, params, SessionLimits(seconds))
    endpoint = Endpoint(sessions, AgentPolicy(generator, encoder), encoder, job.model.hf_checkpoint.name)
    server = EndpointServer(endpoint.application(), job.rollout.openai_port)
    if agent is None:
        return OpenaiParts(server, None)
    context = ContextLimit.of(job.rollout, job.sglang, architecture)
    sampler = AgentSampler(
        *(agent, args, sessions, server.url),
        limits=SessionLimits(seconds, job.rollout.max_turns, context.tokens if context else None),
        calls_at_once=samples_at_once(job) + SAMPLES_AT_ONCE,
        evaluation_priority=evaluation_priority(job.sglang),
        warn=warn,
    )
    return OpenaiParts(server, sampler)


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


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise ConfigError(f"services.{name} is not set: the rollout service needs it", field=f"services.{name}")
    return value
