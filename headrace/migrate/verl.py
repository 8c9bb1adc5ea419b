"""verl's jobs: a YAML file, or a script with `python -m verl.trainer.main_ppo key=value …`. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.migrate.moved import Migration, Mover, carry_by_table, classifier, parsed_yaml, reason, unknown_value
from headrace.migrate.bash import COMPUTED, DECIDED_LATER, UNSET, read_script

_PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main", "main_ppo.py")
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_TABLES = ("data.apply_chat_template_kwargs",)
_OVERRIDES = (
    f"{_ACTOR}.megatron.override_transformer_config.",
    f"{_ACTOR}.megatron.override_ddp_config.",
    f"{_ACTOR}.optim.override_optimizer_config.",
)
_PATH = re.compile(r"(?:\$\{\w+\}|[^$])*/(?:\$\{\w+\}|[^$])*")
"""A path with variables, which keeps their names."""
_SGLANG = f"{_ROLLOUT}.engine_kwargs.sglang."

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
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "--virtual-pipeline-model-parallel-size",
    f"{_ACTOR}.optim.clip_grad": "--clip-grad",
    f"{_ACTOR}.optim.lr_decay_style": "--lr-decay-style",
    f"{_ACTOR}.optim.min_lr": "--min-lr",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "--lr-warmup-fraction",
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
    "critic.model.path": "--critic-load",
    "critic.cliprange_value": "--value-clip",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--lambd",
    "algorithm.rollout_correction.rollout_is_threshold": "--tis-clip",
    "trainer.total_training_steps": "--num-rollout",
    "trainer.n_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.project_name": "--wandb-project",
    "trainer.experiment_name": "--run-name",
    "trainer.critic_warmup": "--num-critic-only-steps",
    "trainer.max_actor_ckpt_to_keep": "--keep-last",
}

_REWARDS = "--rm-type, --custom-rm-path or --reward-model-path: docs/hooks.md"
_DEFAULTS: Mapping[str, Sequence[str]] = {
    "data.train_batch_size": ("--rollout-batch-size", "1024"),
    "data.max_prompt_length": ("--rollout-max-prompt-len", "512"),
    "data.max_response_length": ("--rollout-max-response-len", "512"),
    "data.shuffle": ("--rollout-shuffle",),
    f"{_ROLLOUT}.n": ("--n-samples-per-prompt", "1"),
    f"{_ACTOR}.loss_agg_mode": ("--calculate-per-token-loss",),
    "algorithm.adv_estimator": ("--advantage-estimator", "ppo"),
    "data.apply_chat_template_kwargs": ("--apply-chat-template",),
}
"""What verl does without a setting, where headrace does something else."""

_FSDP = "the trainer is Megatron-core: choose its parallelism with --tensor-model-parallel-size and its companions"
_OFFLOAD = "--colocate moves weights, gradients and optimizer to the CPU while engines generate"
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
    f"{_ROLLOUT}.engine_kwargs": "engines are SGLang's: give its arguments as --sglang-…",
    f"{_ROLLOUT}.enable_chunked_prefill": "give --sglang-chunked-prefill-size",
    f"{_ROLLOUT}.layered_summon": "engines get weights by --update-weight-transport",
    f"{_ROLLOUT}.val_kwargs.do_sample": "give --eval-temperature",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": _LOG_PROBS,
    f"{_ROLLOUT}.calculate_log_probs": "engines' log-probs are always kept",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "give --context-parallel-size",
    f"{_ACTOR}.use_torch_compile": "the model is Megatron's",
    f"{_ACTOR}.megatron.param_offload": _OFFLOAD,
    f"{_ACTOR}.megatron.grad_offload": _OFFLOAD,
    f"{_ACTOR}.megatron.optimizer_offload": f"{_OFFLOAD}; --optimizer-cpu-offload keeps the optimizer there always",
    f"{_ACTOR}.megatron": "weights are converted by headrace's own tables",
    f"{_ACTOR}.ppo_micro_batch_size": "it counts samples of all GPUs: set --micro-batch-size",
    f"{_ACTOR}.ppo_epochs": "a sample is trained once; --num-steps-per-rollout makes several steps of a batch",
    f"{_ACTOR}.shuffle": "steps keep the order of the batch",
    f"{_MODEL}.use_rmpad": _ALWAYS,
    f"{_MODEL}.use_fused_kernels": "log-probs are always computed in chunks, within a fixed memory",
    f"{_MODEL}.target_modules": "give --lora-target-modules",
    f"{_MODEL}.override_config": "the model's shape is its checkpoint's",
    f"{_MODEL}.external_lib": "headrace's models are built in: docs/models.md",
    "actor_rollout_ref.nccl_timeout": "--start-timeout-seconds and --update-weight-timeout-seconds bound what may hang",
    "actor_rollout_ref.hybrid_engine": "--colocate shares the GPUs",
    f"{_ROLLOUT}.max_num_batched_tokens": "give --sglang-chunked-prefill-size",
    f"{_ROLLOUT}.max_num_seqs": "give --sglang-max-running-requests",
    f"{_ROLLOUT}.multi_turn": "turns and tools are a generate function or an agent: docs/hooks.md, docs/agents.md",
    f"{_ROLLOUT}.agent": "turns and tools are a generate function or an agent: docs/hooks.md, docs/agents.md",
    f"{_ROLLOUT}.prompt_length": "--rollout-max-prompt-len bounds prompts",
    f"{_ROLLOUT}.response_length": "--rollout-max-response-len bounds responses",
    "data.truncation": "prompts above --rollout-max-prompt-len are refused, not cut",
    "data.filter_overlong_prompts": "prompts above --rollout-max-prompt-len are not used",
    "data.return_raw_chat": _ALWAYS,
    "data.reward_fn_key": "a row's metadata.rm_type chooses its scorer",
    "data.val_batch_size": "evaluations run as fast as the engines can",
    "data.dataloader_num_workers": "prompts are read by the buffer",
    "reward_model": _REWARDS,
    "reward": _REWARDS,
    "trainer.balance_batch": "give --balance-data",
    "trainer.log_val_generations": "`headrace samples --eval` shows them",
    "trainer.validation_data_dir": "`headrace samples --eval` shows them",
    "trainer.rollout_data_dir": "`headrace samples` shows them",
    "trainer.resume_mode": "the same command resumes",
    "trainer.ray_wait_register_center_timeout": "there is no Ray in a local run",
    "trainer.device": "the device is found",
    "trainer.default_hdfs_dir": "--save names the folder",
    "trainer.remove_previous_ckpt_in_save": "give --keep-last",
    "trainer.use_legacy_worker_impl": "there is one trainer",
    "trainer.profile_steps": "docs/performance.md shows where the time goes",
    "global_profiler": "docs/performance.md shows where the time goes",
    "critic.optim.lr_warmup_steps_ratio": "give --critic-lr-warmup-iters",
    "critic.ppo_micro_batch_size": "the critic has the policy's micro-batches",
    "critic": "the critic has the policy's layout",
    "algorithm.rollout_correction": "docs/algorithms.md lists the corrections: --use-tis and its companions",
    "trainer.val_only": "use `headrace eval`",
    "ray_kwargs": "there is no Ray in a local run",
    "ray_init": "there is no Ray in a local run",
    "critic.ppo_micro_batch_size_per_gpu": "the critic has the policy's micro-batches",
    "critic.model": "--critic-load names its weights; by default they are the policy's",
}


def migrate(path: Path, environment: Mapping[str, str], overrides: Sequence[str] = ()) -> Migration:
    """`overrides` are key=value words, as behind verl's command.

    Raises InvalidArgument for a file that is neither verl's configuration nor a script that starts it.
    """
    of_file = _of_yaml(path) if path.suffix in (".yaml", ".yml") else _of_script(path, environment)
    settings = dict([*of_file, *_of_words(overrides)])
    migration = Migration(str(path))
    for name, value in settings.items():
        _move(migration, name, value, settings)
    if f"{_ROLLOUT}.name" in settings or "trainer.n_gpus_per_node" in settings:
        migration.change(
            "one pool of GPUs for training and rollouts", "--colocate", note="without it name --rollout-num-gpus"
        )
    for name, words in _DEFAULTS.items():
        if name not in settings and not any(word in migration.words for word in words[:1]):
            migration.change(name, *words, note="verl's default")
    if f"{_ACTOR}.ppo_mini_batch_size" not in settings:
        _mini_batch(migration, f"{_ACTOR}.ppo_mini_batch_size=256", 256, {"data.train_batch_size": 1024, **settings})
    if not {"--custom-rm-path", "--reward-model-path"} & set(migration.words):
        migration.change("rewards", note=f"verl chooses a rule by a row's data_source; give {_REWARDS}")
    return migration


def _of_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    tree = parsed_yaml(path)
    if not isinstance(tree, dict) or not {"actor_rollout_ref", "data"} & set(tree):
        raise InvalidArgument(f"{path} has neither actor_rollout_ref nor data: name verl's YAML or its script")
    yield from _leaves("", tree)


def _leaves(prefix: str, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in _TABLES:
            yield from _leaves(f"{name}.", value)
        elif key not in ("_target_", "defaults"):
            yield name, value


def _of_script(path: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    words = read_script(path, environment).command_of(*_PROGRAMS)
    if words is None:
        raise InvalidArgument(f"{path} starts none of {', '.join(_PROGRAMS)}: name the script that starts verl")
    yield from _of_words(words[1:])


def _of_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Hydra's overrides: key=value, +key=value and ++key=value; ~key takes a key away."""
    for word in words:
        name, equals, value = word.partition("=")
        marked = name.startswith(DECIDED_LATER)
        name = name.lstrip(f"+{DECIDED_LATER}")
        if equals and not name.startswith(("-", "~")):
            yield name, DECIDED_LATER + value if marked else _value(value)


def _value(text: str) -> Any:
    """Hydra's lists have no quotes once bash has read them: [console,wandb]."""
    if COMPUTED in text or UNSET in text:
        return text
    if text.startswith("[") and text.endswith("]"):
        return [each.strip(" '\"") for each in text[1:-1].split(",") if each.strip()]
    constants = {"true": True, "false": False, "null": None, "none": None}
    return constants[text.lower()] if text.lower() in constants else literal(text.strip("'\""))


def _move(migration: Migration, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    source = f"{name}={value}".replace(DECIDED_LATER, "")
    if isinstance(value, str) and (why := unknown_value(value)):
        migration.drop(source, why)
    elif isinstance(value, str) and UNSET in value and not _PATH.fullmatch(value):
        migration.drop(source, "neither the script nor the environment sets this: set it yourself")
    elif name in _SPECIAL:
        _SPECIAL[name](migration, source, value, settings)
    elif name in _SAME:
        carry_by_table(migration, source, _SAME[name], value)
    elif name.startswith(_OVERRIDES):
        _override(migration, source, name.rpartition(".")[2], value)
    elif name.startswith(_SGLANG):
        carry_by_table(migration, source, f"--sglang-{name.rpartition('.')[2].replace('_', '-')}", value)
    else:
        migration.drop(source, reason(name, _DROPPED))


def _override(migration: Migration, source: str, field: str, value: Any) -> None:
    """A field of Megatron's configurations, which is a flag here."""
    flag = field.replace("_", "-")
    if isinstance(value, bool):
        migration.carry(source, f"--{flag}" if value else f"--no-{flag}")
    else:
        carry_by_table(migration, source, f"--{flag}", value)


def _files(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _train_files(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, "--prompt-data", *_files(value))
    migration.change(
        "reward_model.ground_truth of a row", "--label-key", "reward_model",
        note="a reward function reads it as sample.label; --rm-type needs a column with the label alone",
    )  # fmt: skip


def _val_files(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    files = [Path(file) for file in _files(value)]
    stems = [file.stem for file in files]
    named = [file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}-{file.stem}" for file in files]
    pairs = [word for name, file in zip(named, files, strict=True) for word in (name, str(file))]
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


def _image(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, "--multimodal-keys", f'{{"image": "{value}"}}')


def _max_epochs(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if settings.get("trainer.total_training_steps") in (None, "null"):
        migration.carry(source, "--num-epoch", str(value))
    else:
        migration.carry(source, note="total_training_steps counts")


def _in_another(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, note="with the setting that turns it on")


def _by_std(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, *(() if value else ("--disable-grpo-std-normalization",)))


def _checkpointing(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    words = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    migration.carry(source, *(words if value else ()))


def _engine(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if value == "sglang":
        migration.carry(source, note="engines are SGLang's")
    else:
        migration.change(source, note="engines are SGLang's")


def _positive(flag: str) -> Mover:
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


def _reward_model(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    if settings.get("reward_model.enable") is True:
        migration.change(source, *classifier(str(value)), note="a sequence classifier of one output: docs/hooks.md")
    else:
        migration.carry(source, note="reward_model.enable is off")


def _folder(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    migration.carry(source, "--save", str(value))


_SPECIAL: Mapping[str, Mover] = {
    "data.image_key": _image,
    "trainer.total_epochs": _max_epochs,
    "data.train_files": _train_files,
    "data.val_files": _val_files,
    f"{_ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{_ACTOR}.clip_ratio": _clip,
    f"{_ACTOR}.kl_loss_type": _kl_type,
    f"{_ACTOR}.loss_agg_mode": _aggregation,
    f"{_MODEL}.enable_gradient_checkpointing": _checkpointing,
    f"{_ROLLOUT}.top_k": _positive("--rollout-top-k"),
    f"{_ROLLOUT}.val_kwargs.top_k": _positive("--eval-top-k"),
    f"{_ROLLOUT}.name": _engine,
    "algorithm.adv_estimator": _estimator,
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_ctrl.kl_coef": _in_another,
    "algorithm.norm_adv_by_std_in_grpo": _by_std,
    "reward_model.model.path": _reward_model,
    "reward_model.enable": _in_another,
    "custom_reward_function.path": _reward_file,
    "custom_reward_function.name": _in_another,
    "trainer.save_freq": _positive("--save-interval"),
    "trainer.test_freq": _positive("--eval-interval"),
    "trainer.logger": _loggers,
    "trainer.val_before_train": _before,
    "trainer.default_local_dir": _folder,
}
