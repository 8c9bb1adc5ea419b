"""One rank's policy and its mathematics as a job wants them. Only this module of the folder reads a whole job.

Which parameters are trained is chosen by regular expressions on Megatron's names. Names are those of the whole model:
`decoder.layers.31.mlp.linear_fc1.weight` whatever stage holds the layer, and `embedding.word_embeddings.weight` for a
tied embedding's copy on the last stage, which is frozen or trained with it (otherwise the stages would wait for each
other's gradients until their timeout).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from headrace.errors import ConfigError
from headrace.hooks import hook_args
from headrace.hooks.trainer import trainer_hook
from headrace.images import image_starts
from headrace.job.megatron import MegatronArgs, megatron
from headrace.job.model import contradictions
from headrace.job.rules.training import replays_routing, uses_critic, uses_reference
from headrace.job.schema.job import Job
from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.models.torch_dist import is_torch_dist
from headrace.trajectory import ModelBounds, Sample
from services.trainer.checkpoint.resharding import ModelState, RandomState, opened
from services.trainer.hugging_face.rank_model import RankModel, image_places
from services.trainer.hugging_face.shards import weights_of
from services.trainer.megatron.gpt import ModelProvider
from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
from services.trainer.megatron.parallel import Layout, initialize
from services.trainer.megatron.routing_replay import RoutingReplay
from services.trainer.metrics import LogProbDistance, Speed, Stopwatch, TeacherDistance, peak_tflops
from services.trainer.model.critic import Critic
from services.trainer.model.frozen_policies import HostCopy, OldLogProbs, OldPolicies, frozen_policy
from services.trainer.model.lora import Adapters, PolicyWeights, attach
from services.trainer.model.memory import RankMemory, TrainedModel
from services.trainer.model.pipeline import Pipeline, Runner, TokenHead
from services.trainer.model.policy import POLICY, Policy, SavedParts, model_facts, start_from
from services.trainer.model.rollout_step import BatchReader, OptimizerSteps, Preparation, teacher_log_probs
from services.trainer.plan.planning import ModelFlops, Planner, cost_of
from services.trainer.plan.rows import Packing, RolloutChoices
from services.trainer.rl.advantages import Advantages
from services.trainer.rl.hooks import WholeBatchHooks, bound
from services.trainer.rl.objective import CustomLoss, Objective, PolicyReducer, custom_correction
from services.trainer.rl.sampling_mask import require_mask
from services.trainer.rl.seen_tokens import LossRecord

_DEFAULT = "build_default"
TRUE_ON_POLICY_BOUND = 1e-3
"""Largest difference of trainer's and engine's log-probs that true_on_policy_mode allows."""


def model_provider(path: str | None) -> ModelProvider | None:
    """`f(pre_process, post_process, vp_stage) -> GPTModel`, or with `build_default` as a fourth; None without.

    `build_default()` makes the module that would be used without the function, to be changed. Weights are loaded by the
    names and shapes of the checkpoint's family, so that they must stay. The critic is made without it.
    """
    if path is None:
        return None
    target = trainer_hook(path, "model_provider").target
    takes_default = _DEFAULT in inspect.signature(target).parameters

    def provide(is_first: bool, is_last: bool, virtual: int | None, build_default: Callable[[], GPTModel]) -> GPTModel:
        given = {_DEFAULT: build_default} if takes_default else {}
        model = target(pre_process=is_first, post_process=is_last, vp_stage=virtual, **given)
        if not isinstance(model, GPTModel):
            raise ConfigError(
                f"hook {path} returned {type(model).__name__}; it must return a megatron.core GPTModel: change the one "
                f"of {_DEFAULT}(), its fourth argument",
                field="custom_model_provider_path",
            )
        return model

    return provide


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def choose_trainable(chunks: Sequence[GPTModel], config: TrainSection, layout: Layout) -> None:
    """Freezes what the job does not train; before gradients get their buffers. Collective.

    Raises ConfigError for a pattern that matches nothing in the whole model, or when nothing is left to train.
    """
    only, freeze = config.only_train_params_name_list, config.freeze_params_name_list
    if not only and not freeze:
        return
    named = [entry for chunk in chunks for entry in named_parameters(chunk)]
    _require_matches([*only, *freeze], [name for name, _ in named], layout)
    trained = 0
    for name, parameter in named:
        is_trained = _matches(only, name) if only else not _matches(freeze, name)
        parameter.requires_grad_(is_trained)
        trained += parameter.numel() if is_trained else 0
    if _over_all(torch.tensor([trained], dtype=torch.int64), layout)[0] == 0:
        raise ConfigError(
            f"nothing is left to train: freeze_params_name_list {list(freeze)} matches every parameter: freeze fewer",
            field="freeze_params_name_list",
        )


def named_parameters(model: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """A stage's parameters by their names in the whole model."""
    numbers = {str(place): str(layer.layer_number - 1) for place, layer in enumerate(model.decoder.layers)}
    is_tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = numbers[words[2]]
        whole = ".".join(words)
        yield (_EMBEDDING if is_tied and whole == _OUTPUT else whole), parameter


def _require_matches(patterns: Sequence[str], names: Sequence[str], layout: Layout) -> None:
    found = torch.tensor([sum(bool(re.search(p, name)) for name in names) for p in patterns], dtype=torch.int64)
    for pattern, matches in zip(patterns, _over_all(found, layout), strict=True):
        if matches == 0:
            raise ConfigError(
                f"{pattern!r} matches no parameter's name; names are Megatron's, e.g. {', '.join(names[:4])}"
            )


def _over_all(counts: torch.Tensor, layout: Layout) -> list[int]:
    counts = counts.to(layout.device)
    dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def objective_of(job: Job) -> Objective:
    """The job's loss. Raises ConfigError for a user's function that cannot be called as the trainer calls it."""
    hooks, args, reducer = job.hooks, hook_args(job), job.hooks.custom_pg_loss_reducer_function_path
    loss, correction = hooks.custom_loss_function_path, hooks.custom_tis_function_path
    return Objective(
        job.train,
        custom_loss=CustomLoss(loss, args) if loss and job.train.loss_type == "custom_loss" else None,
        custom_correction=custom_correction(correction, args) if correction and job.train.use_tis else None,
        reducer=PolicyReducer(reducer, per_token=job.train.calculate_per_token_loss) if reducer else None,
    )


def advantages_of(job: Job, group: dist.ProcessGroup | None) -> Advantages:
    """The job's estimator. `group`: the data-parallel ranks that whiten together."""
    return Advantages(
        job.train,
        group,
        hook=bound(job.hooks.custom_advantage_function_path, "advantage", hook_args(job)),
        distillation=job.distillation.opd_kl_coef if job.distillation.use_opd else None,
    )


def join_ranks(job: Job) -> Layout:
    """Joins the job's other ranks, or is alone. In the thread that will compute."""
    architecture = read_architecture(job.model.hf_checkpoint)
    layout = initialize(megatron(job.megatron), architecture, job.run.seed, alike(job))
    if (path := job.hooks.custom_megatron_init_path) is not None:
        trainer_hook(path, "megatron_init").target(hook_args(job))
    return layout


_SIZES = {"actor_num_nodes", "actor_num_gpus_per_node"}


def alike(job: Job) -> dict[str, str]:
    """Options that all ranks must have alike, by name. Files may have other paths on another machine."""
    of_all = ("train", "lora", "critic", "distillation", "publish", "megatron")
    sections = job.model_dump(include={**dict.fromkeys(of_all, True), "run": {"seed"}, "placement": _SIZES})
    return {
        f"{section}.{name}": str(value)
        for section, options in sections.items()
        for name, value in options.items()
        if value is not None and not isinstance(value, Path)
    }


def policy_of(job: Job, layout: Layout) -> Policy:
    """Loads the starting weights into this rank's shard. Raises ConfigError when they do not fit."""
    args, architecture = megatron(job.megatron), read_architecture(job.model.hf_checkpoint)
    if wrong := contradictions(architecture, args):
        raise ConfigError("; ".join(wrong))
    model, adapters = model_of(job, architecture, args, layout)
    chunks = wrap_for_data_parallel(model.config, args, model.stages)
    rollout_steps = max(1, job.rollout.num_rollout - job.critic.num_critic_only_steps)
    optimizer = Optimizer(args, chunks, rollout_steps * _steps_per_rollout(job))
    stopwatch = Stopwatch(layout.device)
    pipeline = _pipeline(job, architecture, model, chunks, layout, stopwatch)
    critic = critic_of(job, layout, stopwatch) if uses_critic(job) else None
    weights = PolicyWeights(model.converter, adapters, weights_of([chunk.module for chunk in chunks]))
    reference = frozen_policy(weights, job.model.ref_load) if uses_reference(job) else None
    old_policies = _old_policies(job, weights)
    hooks, args_of_hooks = job.hooks, hook_args(job)
    before_log_prob = bound(hooks.custom_megatron_before_log_prob_hook_path, "before_log_prob", args_of_hooks)
    if before_log_prob is not None:
        before_log_prob = partial(before_log_prob, chunks)
    return Policy(
        layout,
        _batches(job, architecture, model.packing, layout),
        Preparation(
            job.train,
            layout,
            pipeline,
            OldLogProbs(job.train, layout, pipeline, old_policies, before_log_prob),
            advantages_of(job, layout.data_group),
            reference=reference,
            teacher=_teacher(job, weights),
            critic=critic,
            data_hook=bound(hooks.rollout_data_postprocess_path, "rollout_data", args_of_hooks),
            before_log_prob=before_log_prob,
            distance=TeacherDistance(layout.device) if job.distillation.use_opd else None,
            top_p=job.rollout.rollout_top_p,
            top_k=job.rollout.rollout_top_k,
        ),
        OptimizerSteps(
            pipeline,
            chunks,
            optimizer,
            stopwatch,
            critic=critic,
            critic_only_steps=job.critic.num_critic_only_steps,
            before_train_step=bound(
                hooks.custom_megatron_before_train_step_hook_path, "before_train_step", args_of_hooks
            ),
        ),
        pipeline,
        model.converter,
        _saved(job, layout, architecture, weights, optimizer, critic, reference, old_policies),
        stopwatch,
        Speed(ModelFlops.of(architecture), layout.world_size, peak_tflops(job.tracking, layout.device)),
        RankMemory(layout.device, [TrainedModel(chunks, optimizer), *([critic.trained] if critic else [])]),
        adapters=adapters,
        hf_checkpoint=job.model.hf_checkpoint,
        vocab_size=architecture.vocab_size,
    )


def critic_of(job: Job, layout: Layout, stopwatch: Stopwatch) -> Critic:
    """The policy's architecture again, with the critic's weights and learning rate."""
    args = megatron(job.megatron).model_copy(
        update={
            "lr": job.critic.critic_lr,
            "lr_warmup_iters": job.critic.critic_lr_warmup_iters,
            "lr_warmup_fraction": None,
        }
    )
    architecture = read_architecture(job.model.hf_checkpoint)
    model = RankModel.of(architecture, args, layout, job.train.packing)
    model.converter.load(job.critic.critic_load or job.model.hf_checkpoint)
    return Critic(
        model,
        args,
        layout,
        stopwatch,
        image_places(model, architecture, job.model.hf_checkpoint, layout),
        value_clip=job.critic.value_clip,
        num_optimizer_steps=job.rollout.num_rollout * _steps_per_rollout(job),
    )


def model_of(
    job: Job, architecture: Architecture, args: MegatronArgs, layout: Layout
) -> tuple[RankModel, Adapters | None]:
    """The model with the weights that the run begins with; parameters that are not trained are frozen."""
    provider = model_provider(job.hooks.custom_model_provider_path)
    model = RankModel.of(architecture, args, layout, job.train.packing, provider)
    initial = job.checkpoint.initial_megatron_checkpoint
    of_megatron = [path for path in (initial, job.checkpoint.load) if path is not None and is_torch_dist(path)]
    model.converter.load(of_megatron[0] if of_megatron else job.model.hf_checkpoint)
    adapters = None
    if job.lora.lora_rank is not None:
        adapters = attach(model, architecture, layout, job.lora, job.run.seed)
        model.converter.add_deltas(adapters.deltas())
    if initial is not None and not of_megatron:
        start_from(opened(initial, layout), model.converter.shards(), adapters)
    choose_trainable(model.stages, job.train, layout)
    return model, adapters


def _pipeline(
    job: Job,
    architecture: Architecture,
    model: RankModel,
    chunks: Sequence[DistributedDataParallel],
    layout: Layout,
    stopwatch: Stopwatch,
) -> Pipeline:
    replay = RoutingReplay(model.stages, layout.tp_rank) if replays_routing(job) else None
    images = image_places(model, architecture, job.model.hf_checkpoint, layout)
    return Pipeline(
        Runner(model.config, chunks, layout, model.packing, stopwatch, replay=replay, images=images),
        TokenHead(model.stages[-1], layout),
        objective_of(job),
        layout,
        job.rollout.rollout_temperature or 1.0,  # greedy rollouts have no temperature to divide by
        model.packing,
        stopwatch,
        LogProbDistance(layout.device),
        agreement_bound=TRUE_ON_POLICY_BOUND if job.train.true_on_policy_mode else None,
        vision=architecture.vision,
        record=LossRecord(is_policy_loss=job.train.loss_type != "sft_loss") if logs_samples(job, layout) else None,
    )


def logs_samples(job: Job, layout: Layout) -> bool:
    """True for the one rank that writes down the samples of those that have the same ones."""
    return layout.is_reporting_rank and layout.is_last_stage and job.tracking.sample_log_bytes > 0


def _batches(job: Job, architecture: Architecture, packing: Packing, layout: Layout) -> BatchReader:
    per_rank = job.train.max_tokens_per_gpu
    planner = Planner(
        dp_size=layout.data_size,
        packing=packing,
        micro_batch_size=job.train.micro_batch_size,
        # The ranks of a context group have a part of each micro-batch.
        max_tokens=None if per_rank is None else per_rank * layout.context.size,
        cost=cost_of(job.train),
        multiple_of=layout.micro_batch_multiple,
        needs_reward=job.needs_reward,
    )
    experts = architecture.experts if job.train.use_rollout_routing_replay else None
    choices = RolloutChoices(architecture.num_layers, experts) if experts else None
    check, vision = _sample_check(job, architecture, choices), architecture.vision
    paths = {
        "sample_filter": job.hooks.rollout_sample_filter_path,
        "train_data": job.hooks.custom_convert_samples_to_train_data_path,
        "reward_post_process": job.hooks.custom_reward_post_process_path,
        "rollout_log": job.hooks.custom_rollout_log_function_path,
    }
    hooks = WholeBatchHooks(layout, hook_args(job), **paths) if any(paths.values()) else None
    return BatchReader(job.train, planner, check, layout, packing, hooks=hooks, choices=choices, vision=vision)


def _sample_check(job: Job, architecture: Architecture, choices: RolloutChoices | None) -> Callable[[Sample], None]:
    """Raises InvalidArgument for a sample that this model and this job cannot be trained on."""
    bounds, vision = ModelBounds.of(architecture), architecture.vision
    needs_masks = job.train.keep_sampling_mask and (job.train.true_on_policy_mode or job.train.keep_old_actor)
    is_taught_elsewhere = job.distillation.use_opd and job.distillation.opd_type != "megatron"

    def check(sample: Sample) -> None:
        bounds.check(sample.sample_id, sample.tokens, sample.columns)
        if vision is not None:
            image_starts(f"sample {sample.sample_id}:", vision, sample.tokens, sample.columns)
        if choices is not None:
            choices.check(sample)
        if is_taught_elsewhere:
            teacher_log_probs(sample)
        if needs_masks:
            require_mask(sample)

    return check


def _teacher(job: Job, weights: PolicyWeights) -> HostCopy | None:
    if not job.distillation.use_opd or job.distillation.opd_type != "megatron":
        return None
    return frozen_policy(weights, job.distillation.opd_teacher_load)


def _old_policies(job: Job, weights: PolicyWeights) -> OldPolicies | None:
    if not job.train.keep_old_actor:
        return None
    interval = job.publish.update_weights_interval
    # The oldest sample that is admitted, in publications, and the newest publication.
    capacity = job.buffer.max_staleness // interval + 2
    return OldPolicies(weights.changing, weights.changing_shards, capacity=capacity, publish_interval=interval)


def _saved(
    job: Job,
    layout: Layout,
    architecture: Architecture,
    weights: PolicyWeights,
    optimizer: Optimizer,
    critic: Critic | None,
    reference: HostCopy | None,
    old_policies: OldPolicies | None,
) -> SavedParts:
    models = [ModelState(POLICY, weights.shards, optimizer)]
    if critic is not None:
        models.append(critic.state)
    if reference is not None and job.train.ref_update_interval is not None:
        models.append(reference.state("reference"))
    others: Sequence[RandomState | OldPolicies] = [RandomState(layout.rank), *([old_policies] if old_policies else [])]
    return SavedParts(model_facts(architecture, weights.adapters), models, others)


def _steps_per_rollout(job: Job) -> int:
    return job.train.num_steps_per_rollout or 1
