"""verl's jobs: a YAML file, or a script with `python -m verl.trainer.main_ppo key=value …`. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.migrate.moved import Migration, carry_by_table
from headrace.migrate.shell import COMPUTED, command_of, read_script

_PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main")
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_SAME: Mapping[str, str] = {
    "data.prompt_key": "--input-key",
    "data.train_batch_size": "--rollout-batch-size",
    "data.max_prompt_length": "--rollout-max-prompt-len",
    "data.max_response_length": "--rollout-max-response-len",
    "data.shuffle": "--rollout-shuffle",
    "data.seed": "--rollout-seed",
    "data.apply_chat_template_kwargs": "--apply-chat-template-kwargs",
    f"{_MODEL}.path": "--hf-checkpoint",
    f"{_MODEL}.trust_remote_code": "--trust-remote-code",
    f"{_MODEL}.lora_rank": "--lora-rank",
    f"{_MODEL}.lora_alpha": "--lora-alpha",
    f"{_ACTOR}.optim.lr": "--lr",
    f"{_ACTOR}.optim.weight_decay": "--weight-decay",
    f"{_ACTOR}.optim.lr_warmup_steps": "--lr-warmup-iters",
    f"{_ACTOR}.grad_clip": "--clip-grad",
    f"{_ACTOR}.use_dynamic_bsz": "--use-dynamic-batch-size",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "--max-tokens-per-gpu",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    f"{_ACTOR}.use_kl_loss": "--use-kl-loss",
    f"{_ACTOR}.kl_loss_coef": "--kl-loss-coef",
    f"{_ACTOR}.entropy_coeff": "--entropy-coef",
    f"{_ACTOR}.clip_ratio_low": "--eps-clip",
    f"{_ACTOR}.clip_ratio_high": "--eps-clip-high",
    f"{_ACTOR}.clip_ratio_c": "--eps-clip-c",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "--tensor-model-parallel-size",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    f"{_ACTOR}.megatron.context_parallel_size": "--context-parallel-size",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "--expert-model-parallel-size",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    f"{_ROLLOUT}.n": "--n-samples-per-prompt",
    f"{_ROLLOUT}.temperature": "--rollout-temperature",
    f"{_ROLLOUT}.top_p": "--rollout-top-p",
    f"{_ROLLOUT}.tensor_model_parallel_size": "--rollout-num-gpus-per-engine",
    f"{_ROLLOUT}.gpu_memory_utilization": "--sglang-mem-fraction-static",
    f"{_ROLLOUT}.max_model_len": "--rollout-max-context-len",
    f"{_ROLLOUT}.enforce_eager": "--sglang-disable-cuda-graph",
    f"{_ROLLOUT}.val_kwargs.temperature": "--eval-temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "--eval-top-p",
    f"{_ROLLOUT}.val_kwargs.n": "--n-samples-per-eval-prompt",
    "critic.optim.lr": "--critic-lr",
    "critic.cliprange_value": "--value-clip",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--lambd",
    "algorithm.rollout_correction.rollout_is_threshold": "--tis-clip",
    "trainer.total_training_steps": "--num-rollout",
    "trainer.total_epochs": "--num-epoch",
    "trainer.n_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.project_name": "--wandb-project",
    "trainer.experiment_name": "--run-name",
    "trainer.critic_warmup": "--num-critic-only-steps",
    "trainer.max_actor_ckpt_to_keep": "--keep-last",
}

_FSDP = "the trainer is Megatron-core: choose its parallelism with --tensor-model-parallel-size and its companions"
_ALWAYS = "headrace does this always"
_LOG_PROBS = "log-probs are computed in the same micro-batches as training"
_DROPPED: Mapping[str, str] = {
    f"{_ACTOR}.strategy": _FSDP,
    f"{_ACTOR}.fsdp_config": _FSDP,
    "critic.model.fsdp_config": _FSDP,
    "critic.strategy": _FSDP,
    "actor_rollout_ref.ref": "the reference policy has the trainer's layout; --ref-load names another checkpoint",
    f"{_MODEL}.use_remove_padding": _ALWAYS,
    f"{_MODEL}.use_shm": "weights are read once, from --hf-checkpoint",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _LOG_PROBS,
    f"{_ROLLOUT}.log_prob_micro_batch_size": _LOG_PROBS,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _LOG_PROBS,
    f"{_ROLLOUT}.mode": "all requests are asynchronous",
    f"{_ROLLOUT}.dtype": "engines have the trainer's type",
    f"{_ROLLOUT}.load_format": "engines get the trainer's weights before the first request",
    f"{_ROLLOUT}.free_cache_engine": "--colocate frees engines' memory while training",
    f"{_ROLLOUT}.max_num_batched_tokens": "give --sglang-chunked-prefill-size",
    f"{_ROLLOUT}.max_num_seqs": "give --sglang-max-running-requests",
    f"{_ROLLOUT}.multi_turn": "turns and tools are a generate function or an agent: docs/hooks.md, docs/agents.md",
    f"{_ROLLOUT}.agent": "turns and tools are a generate function or an agent: docs/hooks.md, docs/agents.md",
    f"{_ROLLOUT}.prompt_length": "--rollout-max-prompt-len bounds prompts",
    f"{_ROLLOUT}.response_length": "--rollout-max-response-len bounds responses",
    "data.truncation": "prompts above --rollout-max-prompt-len are refused, not cut",
    "data.filter_overlong_prompts": "prompts above --rollout-max-prompt-len are not used",
    "data.return_raw_chat": _ALWAYS,
    "data.image_key": "give --multimodal-keys",
    "data.reward_fn_key": "a row's metadata.rm_type chooses its scorer",
    "data.val_batch_size": "evaluations run as fast as the engines can",
    "data.dataloader_num_workers": "prompts are read by the buffer",
    "reward_model": "--rm-type, --custom-rm-path or --reward-model-path: docs/hooks.md",
    "reward": "--rm-type, --custom-rm-path or --reward-model-path: docs/hooks.md",
    "trainer.balance_batch": "give --balance-data",
    "trainer.log_val_generations": "`headrace samples --eval` shows them",
    "trainer.validation_data_dir": "`headrace samples --eval` shows them",
    "trainer.rollout_data_dir": "`headrace samples` shows them",
    "trainer.resume_mode": "the same command resumes",
    "trainer.ray_wait_register_center_timeout": "there is no Ray in a local run",
    "trainer.device": "the device is found",
    "trainer.val_only": "use `headrace eval`",
    "ray_kwargs": "there is no Ray in a local run",
    "ray_init": "there is no Ray in a local run",
    "critic.ppo_micro_batch_size_per_gpu": "the critic has the policy's micro-batches",
    "critic.model": "--critic-load names its weights; by default they are the policy's",
}


def migrate(path: Path) -> Migration:
    """Raises InvalidArgument for a file that is neither verl's configuration nor a script that starts it."""
    settings = dict(_of_yaml(path) if path.suffix in (".yaml", ".yml") else _of_script(path))
    migration = Migration(str(path))
    for name, value in settings.items():
        _move(migration, name, value, settings)
    if f"{_ROLLOUT}.name" in settings or "trainer.n_gpus_per_node" in settings:
        migration.change(
            "one pool of GPUs for training and rollouts", "--colocate", note="without it name --rollout-num-gpus"
        )
    if not any("--apply-chat-template" in each.words for each in migration.moved):
        migration.change("prompts are messages", "--apply-chat-template", note="verl renders them by the template too")
    return migration


def _of_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict) or "actor_rollout_ref" not in tree:
        raise InvalidArgument(f"{path} has no actor_rollout_ref: name verl's YAML, or the script that starts it")
    yield from _leaves("", tree)


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in ("data.apply_chat_template_kwargs",):
            yield from _leaves(f"{name}.", value)
        else:
            yield name, value


def _of_script(path: Path) -> Iterator[tuple[str, Any]]:
    words = command_of(read_script(path), *_PROGRAMS)
    if words is None:
        raise InvalidArgument(f"{path} starts none of {', '.join(_PROGRAMS)}: name the script that starts verl")
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals and not name.startswith("-"):
            yield name.lstrip("+~"), value if COMPUTED in value else literal(value)


def _move(migration: Migration, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    source = f"{name}={value}"
    if isinstance(value, str) and (COMPUTED in value or "${" in value):
        migration.drop(source, "the script computes this value when it runs: set it yourself")
    elif name in _SPECIAL:
        _SPECIAL[name](migration, source, value, settings)
    elif name in _SAME:
        carry_by_table(migration, source, _SAME[name], value)
    else:
        migration.drop(source, _why(name))


def _why(name: str) -> str:
    """The reason of the name, or of the section that it is in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_DROPPED[each] for each in prefixes if each in _DROPPED), "no option of headrace means this")


def _files(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _train_files(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, "--prompt-data", *_files(value))
    migration.change(
        "reward_model.ground_truth of a row", "--label-key", "reward_model",
        note="a reward function reads it as sample.label; --rm-type needs a column with the label alone",
    )  # fmt: skip


def _val_files(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    pairs = [word for file in _files(value) for word in (Path(file).stem, file)]
    migration.carry(source, "--eval-prompt-data", *pairs)


def _mini_batch(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    batch = settings.get("data.train_batch_size")
    if isinstance(value, int) and isinstance(batch, int) and value and not batch % value:
        migration.change(
            source, "--num-steps-per-rollout", str(batch // value),
            note=f"optimizer steps of a batch of {batch} prompts; verl counts prompts of one",
        )  # fmt: skip
    else:
        migration.drop(source, "set --num-steps-per-rollout: the optimizer steps of a batch")


def _estimator(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    names = {"gae": "ppo", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline"}
    migration.carry(source, "--advantage-estimator", names.get(str(value), str(value)))


def _clip(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if f"{_ACTOR}.clip_ratio_low" in settings:
        migration.carry(source, note="clip_ratio_low and clip_ratio_high are given")
    else:
        migration.carry(source, "--eps-clip", str(value))


def _kl_type(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    names = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}
    migration.carry(source, "--kl-loss-type", names.get(str(value), str(value)))


def _aggregation(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if value == "token-mean":
        migration.carry(source, "--calculate-per-token-loss")
    elif value == "seq-mean-token-mean":
        migration.carry(source, note="the default here")
    else:
        migration.drop(source, "losses are means of tokens (--calculate-per-token-loss) or of responses (the default)")


def _kl_in_reward(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    coefficient = settings.get("algorithm.kl_ctrl.kl_coef", 0.001)
    migration.carry(source, *(("--kl-coef", str(coefficient)) if value else ()))


def _in_another(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, note="with the setting that turns it on")


def _by_std(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, *(() if value else ("--disable-grpo-std-normalization",)))


def _checkpointing(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    words = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    migration.carry(source, *(words if value else ()))


def _top_k(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, *(("--rollout-top-k", str(value)) if isinstance(value, int) and value > 0 else ()))


def _engine(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if value == "sglang":
        migration.carry(source, note="engines are SGLang's")
    else:
        migration.change(source, note="engines are SGLang's")


def _positive(flag: str) -> Callable[[Migration, str, Any, Mapping[str, Any]], None]:
    """Of settings in which -1 means never."""

    def move(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
        migration.carry(source, *((flag, str(value)) if isinstance(value, int) and value > 0 else ()))

    return move


def _loggers(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    names = _files(value)
    words = [flag for name, flag in (("wandb", "--use-wandb"), ("tensorboard", "--use-tensorboard")) if name in names]
    migration.carry(source, *words, note="" if words else "the console and the run's folder have every metric")


def _before(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, *(() if value else ("--skip-eval-before-train",)))


def _reward_file(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    name = settings.get("custom_reward_function.name", "compute_score")
    migration.change(
        source, "--custom-rm-path", f"{value}:{name}",
        note="verl calls f(data_source, solution_str, ground_truth, extra_info); write `async def f(args, sample, "
        "**kwargs)` around it",
    )  # fmt: skip


def _folder(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, "--save", str(value))


_SPECIAL: Mapping[str, Callable[[Migration, str, Any, Mapping[str, Any]], None]] = {
    "data.train_files": _train_files,
    "data.val_files": _val_files,
    f"{_ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{_ACTOR}.clip_ratio": _clip,
    f"{_ACTOR}.kl_loss_type": _kl_type,
    f"{_ACTOR}.loss_agg_mode": _aggregation,
    f"{_MODEL}.enable_gradient_checkpointing": _checkpointing,
    f"{_ROLLOUT}.top_k": _top_k,
    f"{_ROLLOUT}.name": _engine,
    "algorithm.adv_estimator": _estimator,
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_ctrl.kl_coef": _in_another,
    "algorithm.norm_adv_by_std_in_grpo": _by_std,
    "custom_reward_function.path": _reward_file,
    "custom_reward_function.name": _in_another,
    "trainer.save_freq": _positive("--save-interval"),
    "trainer.test_freq": _positive("--eval-interval"),
    "trainer.logger": _loggers,
    "trainer.val_before_train": _before,
    "trainer.default_local_dir": _folder,
}
