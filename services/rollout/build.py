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
from headrace.rpc.listen import Listen
from headrace.run_folder import RunFolder
from headrace.sample_checks import ModelBounds
from services.rollout.admission.groups_limit import GroupsLimit
from services.rollout.admission.load_watch import LoadWatch
from services.rollout.admission.shares import Kind
from services.rollout.agents.build import openai_parts
from services.rollout.agents.hosts import AgentHosts
from services.rollout.chat.images import image_reader
from services.rollout.devices.turn import EngineTurn
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory
from services.rollout.engine.routing.router import Router
from services.rollout.engine.scaling.scaler import Scaler
from services.rollout.evaluation.eval_file import EvalFiles
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE, Evaluator
from services.rollout.fleet_build import capacity, slots_of
from services.rollout.in_flight import engine_slots, groups_at_once, samples_at_once, samples_of, samples_together
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.failed_samples import FailedSamples
from services.rollout.production.generator import Generator
from services.rollout.production.groups import GroupSampler
from services.rollout.production.hooks.all_samples import AllSamples
from services.rollout.production.hooks.custom import HookSampler, custom_args
from services.rollout.production.hooks.filter import GroupFilter
from services.rollout.production.hooks.sample_hooks import HookedSampler, SampleHooks
from services.rollout.production.ledger import STREAM, BufferLedger
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, Sampler, job_params
from services.rollout.production.supervised import supervised_parts
from services.rollout.production.teacher import Teacher
from services.rollout.production.time_limit import GRACE_SECONDS, request_ender
from services.rollout.publication.receiver import Receiver
from services.rollout.rollout_function.build import eval_function, step_function
from services.rollout.scoring import SampleScorer
from services.rollout.service import RolloutParts, RolloutService

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
    seconds = job.rollout.generate_timeout_seconds
    params, seed = job_params(job.rollout), job.data.rollout_seed
    folder, trusts, variables = (
        job.model.hf_checkpoint,
        job.model.trust_remote_code,
        job.data.apply_chat_template_kwargs,
    )
    apply = job.data.apply_chat_template
    images = image_reader(folder, job.data, job.eval, job.buffer.prompt_root)
    encoder = PromptEncoder(
        folder, apply_chat_template=apply, variables=variables, trust_remote_code=trusts, images=images
    )
    metrics = RolloutMetrics(registry)
    timing = FleetTiming.of(job.placement, start_seconds=job.services.start_timeout_seconds)
    request_seconds = seconds + GRACE_SECONDS
    router = Router(job.rollout, log_dir / "router.log", request_seconds=request_seconds, timing=timing)
    asks_for_experts = job.train.use_rollout_routing_replay
    architecture = read_architecture(job.model.hf_checkpoint)
    router_client = EngineClient(router.url, routed_experts=asks_for_experts, vocab_size=architecture.vocab_size)
    buffer = buffer_of(job.services)
    fleet = Fleet(
        job.placement.num_engines,
        slots_of(job),
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
        context=ContextLimit.of_engines(job.sglang, architecture, job.placement.engine_groups),
        activity=fleet.activity,
        end_request=request_ender(lambda: fleet.engines),
        has_grammars=job.sglang.get("grammar_backend") != "none",
    )
    slots = engine_slots(job.rollout, job.eval)
    hook, args = job.rollout.custom_generate_function_path, hook_args(job)
    warnings: list[str] = []

    def hook_sampler(path: str) -> HookSampler:
        return HookSampler(
            path,
            custom_args(args, router.url),
            fleet.weights,
            seconds=seconds,
            calls_at_once=samples_at_once(job.rollout) + SAMPLES_AT_ONCE,
            per_sample=job.rollout.generate_per_sample,
            activity=fleet.activity,
            warn=warnings.append,
        )

    custom = hook_sampler(hook) if hook else None
    functions = {each.custom_generate_function_path for each in eval_sets(job.eval)} - {None}
    of_data_sets = {path: hook_sampler(path) for path in sorted(filter(None, functions))}
    openai = openai_parts(
        *(job, args, generator, encoder, params, architecture),
        listen=listen,
        slots=slots,
        calls_at_once=samples_at_once(job.rollout) + SAMPLES_AT_ONCE,
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
            samples_together=samples_together(job),
        )
    )
    sample_hooks = SampleHooks.of(job.rollout, args)
    sampler = _hooked(sampler, sample_hooks)
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
    supervised = supervised_parts(job.train, folder, variables, trust_remote_code=trusts)
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
        failed_samples=FailedSamples.of(job.tracking, samples_dir, number),
        slots=None if supervised else slots,
        all_samples=all_samples,
    )
    producer = Producer(
        steps.ledger if steps else BufferLedger(buffer, STREAM),
        groups,
        lambda: fleet.policy_version,
        metrics,
        max_groups_in_flight=groups_at_once(job.rollout),
        interrupt=fleet.interrupt,
    )

    def limit_groups(groups: int) -> None:
        producer.limit_groups(groups)
        slots.resize(Kind.TRAINING, samples_of(job.rollout, groups))

    load_watch = LoadWatch(
        lambda: fleet.engines,
        GroupsLimit(groups_at_once(job.rollout)),
        lambda: producer.groups_in_flight,
        limit_groups,
        metrics.background_work_ended,
    )
    receiver = Receiver(fleet, RunFolder(job.run.run_dir / job.run.run_name).weights_of(job.publish))
    metrics.watch_requests(slots.shares, lambda: producer.max_groups_in_flight)
    parts = RolloutParts(
        encoder=encoder,
        generator=generator,
        sampler=steps.sampler if steps else sampler,
        scorer=scorer,
        evaluator=Evaluator(
            *(encoder, sampler, scorer, params),
            seed=seed,
            files=_eval_files(job),
            slots=slots,
            scores_groups=job.reward.group_rm,
            samplers={path: _hooked(each, sample_hooks) for path, each in of_data_sets.items()},
            function=by_function,
        ),
        fleet=fleet,
        scaler=Scaler(fleet, capacity(job, has_accelerator=has_accelerator), metrics),
        receiver=receiver,
        producer=producer,
        turn=EngineTurn(fleet, producer, receiver) if job.placement.offload_rollout else None,
        metrics=metrics,
        slots=slots,
        params=params,
        generate_seconds=seconds,
        router_url=router.url,
        agent_hosts=agents.player if agents and isinstance(agents.player, AgentHosts) else None,
        warnings=warnings,
    )
    of_steps, tool_calls = steps.sampler if steps else None, openai.tool_calls if openai else None
    started = (custom, agents, of_steps, by_function, all_samples, sample_hooks, tool_calls)
    return RolloutService(
        *(parts, router, router_client, buffer),
        custom=[*(each for each in started if each), *of_data_sets.values()],
        endpoint=openai.server if openai else None,
        group_filter=group_filter,
        teacher=teacher,
        conversations=supervised.encoder if supervised else None,
        load_watch=load_watch if job.rollout.adapt_groups_in_flight and not supervised else None,
    )


def _hooked(sampler: Sampler, hooks: SampleHooks | None) -> Sampler:
    return HookedSampler(sampler, hooks) if hooks else sampler


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
    return ContextLimit.of(job.rollout, job.sglang, architecture, job.placement.engine_groups)


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise ConfigError(f"services.{name} is not set: the rollout service needs it", field=f"services.{name}")
    return value
