"""The rules over several options, in one order. Each message names the contradicting values and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.devices import cpu_has_bfloat16, num_gpus
from headrace.errors import ConfigError
from headrace.job.algorithms import ALGORITHMS
from headrace.job.megatron import OPTIMIZER_ON_GPU, megatron
from headrace.job.model import check_adapters, check_layout, check_served_adapters, contradictions, virtual_stages
from headrace.job.rules.combinations import check_combinations
from headrace.job.rules.files import check_files, check_folders, check_passwords, check_remote_code
from headrace.job.rules.machines import (
    check_colocation,
    check_meeting,
    check_metrics_port,
    check_nodes,
    check_service_host,
    check_services,
    check_transport,
    device_plan,
)
from headrace.job.rules.production import (
    check_engine_machines,
    check_engine_model,
    check_engine_ranks,
    check_images,
    check_lengths,
    check_production,
)
from headrace.job.rules.scope import Scope
from headrace.job.rules.training import (
    check_routing_replay,
    check_training,
    offloads_activations,
    require_gpus,
    require_states_that_are_saved,
    rounds_kv_cache,
    uses_critic,
)
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.models.registry import architecture, differences, find, read_architecture


def check(job: Job, scope: Scope) -> None:
    """Raises ConfigError for the first rule that a resolved job breaks: the job's own rules first, then the scope's."""
    for rule in (
        check_colocation,
        check_combinations,
        check_training,
        check_services,
        check_production,
        check_passwords,
        check_nodes,
        check_transport,
    ):
        rule(job)
    for scoped in (
        check_meeting,
        check_metrics_port,
        check_service_host,
        check_files,
        check_remote_code,
        check_folders,
    ):
        scoped(job, scope)
    if "trainer" in scope.services:
        require_gpus(job, scope)
        offloads_activations(job, scope)
        require_states_that_are_saved(job, scope)
    if "rollout" in scope.services:
        check_engine_machines(job, scope)
    if "trainer" in scope.services or "rollout" in scope.services:
        _check_architecture(job, scope)
        device_plan(job, scope)


def _check_architecture(job: Job, scope: Scope) -> None:
    found, args = known_architecture(job), megatron(job.megatron)
    if found is None:
        return
    if wrong := contradictions(found, args):
        raise ConfigError("; ".join(wrong))
    check_layout(found, args)
    virtual_stages(found, args)
    check_routing_replay(job, found)
    if job.lora.lora_rank is not None:
        check_adapters(found, args, job.lora.lora_target_modules)
        if job.publish.update_weight_transport == "adapter":
            check_served_adapters(found, job.lora.lora_target_modules)
    check_images(job, found)
    check_lengths(job, found)
    check_engine_ranks(job, found, scope)
    if "rollout" in scope.services and job.asks_engines:
        check_engine_model(job, found, scope)
    if job.model.model is not None and (other := differences(find(job.model.model), found)):
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is not {job.model.model}: its config.json says "
            f"{'; '.join(other)}. Name that model's folder, or leave --model out"
        )


def known_architecture(job: Job) -> Architecture | None:
    """The architecture of the model's folder, else of the preset; None when this machine has neither."""
    if (job.model.hf_checkpoint / "config.json").is_file():
        return read_architecture(job.model.hf_checkpoint)
    return None if job.model.model is None else architecture(find(job.model.model).config)


# Settings that are allowed and probably not intended: `headrace check` and `headrace train` warn and continue.


def warnings(job: Job) -> list[str]:
    """Sentences about a resolved job that say what will happen and what to set."""
    if job.serves_tinker:
        return list(_of_the_machine(job))
    return [*_of_training(job), *_of_the_machine(job), *algorithm_warnings(job), *_of_drafts(job), *_of_parts(job)]


def algorithm_warnings(job: Job) -> list[str]:
    """None for supervised fine-tuning, which samples nothing."""
    return [] if job.train.loss_type == "sft_loss" else list(_of_sampling(job))


def _of_training(job: Job) -> Iterator[str]:
    args, folder = megatron(job.megatron), job.checkpoint.load
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "sequence_parallel has no effect with tensor_model_parallel_size 1 and is turned off"
    if folder is not None and not folder.exists():
        yield f"load {folder} does not exist yet: training starts from the beginning, with hf_checkpoint's weights"
    if job.eval.eval_interval is not None and not job.eval.is_asked_for:
        yield f"eval_interval {job.eval.eval_interval} has no effect without eval_prompt_data: nothing is evaluated"
    if (steps := job.debug.profiled_steps) and steps[0] > job.rollout.num_rollout:
        yield f"profile_steps {job.debug.profile_steps}: the run ends after step {job.rollout.num_rollout}"
    if not job.debug.debug_rollout_only:
        if args.lr == 0:
            yield "lr 0: the policy never changes: pass --lr 1e-6 or another learning rate"
        if uses_critic(job) and job.critic.critic_lr == 0:
            yield "critic_lr 0: the critic never changes: pass --critic-lr 1e-6 or another learning rate"


def _of_the_machine(job: Job) -> Iterator[str]:
    if num_gpus():
        return
    args = megatron(job.megatron)
    if args.bf16 and not cpu_has_bfloat16():
        yield (
            "bf16 on this machine is slower than float32: it has no GPU, and its CPU has no instructions for bfloat16 "
            "(avx512_bf16 or amx_bf16): leave --bf16 out to train here"
        )
    if given := args.given(OPTIMIZER_ON_GPU):
        yield f"{', '.join(given)}: without effect on this machine, which has no GPU"


def _of_sampling(job: Job) -> Iterator[str]:
    train, rollout, hooks = job.train, job.rollout, job.hooks
    narrowed = [f"rollout_top_p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p < 1 else []
    narrowed += [] if rollout.rollout_top_k is None else [f"rollout_top_k {rollout.rollout_top_k}"]
    if rounds_kv_cache(job) and not (train.use_tis or train.use_rs or hooks.custom_loss_function_path):
        yield (
            f"--sglang-kv-cache-dtype {job.sglang['kv_cache_dtype']}: engines sample from rounded keys and values, so "
            "their policy is not quite the trainer's: correct for it with --use-tis"
        )
    if narrowed and not train.keep_sampling_mask:
        yield (
            f"{' and '.join(narrowed)}: engines sample from fewer tokens than the recorded log-probs cover, so the "
            "policy that generated the samples is not the one that the loss corrects for: pass --keep-sampling-mask, "
            "or train with rollout_top_p 1 and no rollout_top_k"
        )
    replaced = hooks.custom_reward_post_process_path or hooks.custom_advantage_function_path or rollout.user_function
    compares = ALGORITHMS[train.advantage_estimator].compares_group and not train.disable_rewards_normalization
    if rollout.n_samples_per_prompt == 1 and compares and not replaced:
        yield (
            f"advantage_estimator {train.advantage_estimator} compares the samples of a prompt, and "
            "n_samples_per_prompt is 1: every advantage is 0 and nothing is learned: raise n_samples_per_prompt"
        )
    if rollout.rollout_temperature == 0:
        yield (
            "rollout_temperature 0: all samples of a prompt are the same greedy response, so none is better than "
            "another: train with a temperature of about 1"
        )


def _of_drafts(job: Job) -> Iterator[str]:
    """Samples are exact whatever drafts propose: the model verifies each token."""
    algorithm, draft = job.sglang.get("speculative_algorithm"), job.sglang.get("speculative_draft_model_path")
    if algorithm is None or algorithm.upper() == "NGRAM" or job.debug.debug_rollout_only or job.debug.trains_alone:
        return
    drafting = "the layers that predict further tokens stay" if draft is None else f"the draft model {draft} stays"
    yield (
        f"--sglang-speculative-algorithm {algorithm}: {drafting} as published first, while the policy is trained, so "
        "fewer drafts are accepted with time and generation slows down. Samples stay exact. Watch spec_accept_length, "
        "or use NGRAM, which has no weights"
    )


def _of_parts(job: Job) -> Iterator[str]:
    """Says which part of the job is left out."""
    if job.debug.trains_alone and job.eval.is_asked_for:
        yield "nothing is evaluated: load_debug_rollout_data trains without engines"
    if job.debug.debug_rollout_only and job.checkpoint.save_hf is not None:
        yield "nothing is exported to save_hf: debug_rollout_only trains nothing"
