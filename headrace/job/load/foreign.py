"""Flags of slime's and Megatron's command lines that headrace does not have, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_LEDGER = "every sample is in the ledger: `headrace samples` shows it, `headrace buffer export` writes Parquet"
_RESUME = "a resumed run continues its whole state; to begin with weights alone, name them with "
_RESUME += "--initial-megatron-checkpoint"
_OFFLOAD = "--colocate turns both on; --no-offload-train or --no-offload-rollout turns one off"
_ROUTER = "sglang-router spreads the requests: choose how with --router-policy"
_FSDP = "the trainer is Megatron-core: recompute activations with --recompute-granularity, and choose attention with "
_FSDP += "--attention-backend"
_RUN = "a W&B run is named after --run-name, and its id follows the run's folder"
_KEY = "a key on a command line is seen by everyone on the machine: set WANDB_API_KEY, or run `wandb login`"
_ENGINES = "an engine is checked once it has started, for which it has --start-timeout-seconds"
_STEPS = "the length of a run is --num-rollout, or --num-epoch over --prompt-data"
_ALWAYS = "it is always on"
_REPORTED = "the run's folder has every metric, and --use-tensorboard and --use-wandb show them"
_CHUNKS = "log-probs are always computed in chunks, within a fixed memory"
_MTP = "layers that predict further tokens are kept as they are and not trained"

_REASONS: Mapping[str, Sequence[str]] = {
    "--loss-type sft_loss computes none": ("disable_compute_advantages_and_returns",),
    _LEDGER: ("save_debug_train_data", "dump_details"),
    _RESUME: (
        "no_load_rng",
        "no_load_optim",
        "no_save_rng",
        "no_save_optim",
        "finetune",
        "ckpt_step",
        "start_rollout_id",
    ),
    _OFFLOAD: ("offload",),
    "with --colocate it is called --offload-train": ("release_train",),
    _ROUTER: ("use_slime_router", "slime_router_middleware_paths", "sglang_router_ip", "sglang_router_port"),
    "--max-groups-in-flight bounds what is generated at once": ("sglang_server_concurrency",),
    _FSDP: ("gradient_checkpointing", "attn_implementation", "fsdp_cpu_offload"),
    "weights are converted by headrace's own tables": ("megatron_to_hf_mode", "model_name"),
    _MTP: ("enable_mtp_training",),
    "give the values as flags of their own": ("custom_config_path",),
    _KEY: ("wandb_key",),
    _RUN: (
        "wandb_run_id",
        "wandb_random_suffix",
        "disable_wandb_random_suffix",
        "wandb_exp_name",
        "wandb_save_dir",
        "wandb_dir",
        "wandb_host",
        "tb_project_name",
        "tb_experiment_name",
        "tensorboard_dir",
    ),
    _ENGINES: ("rollout_health_check_first_wait",),
    _STEPS: ("train_iters", "train_samples", "exit_interval"),
    _ALWAYS: ("use_mcore_models", "use_flash_attn"),
    _REPORTED: ("log_interval", "log_passrate", "log_multi_turn", "log_throughput"),
    _CHUNKS: ("log_probs_chunk_size", "recompute_loss_function"),
    "rows are padded as the layout needs": ("data_pad_size_multiplier",),
    "the vocabulary is the checkpoint's": ("make_vocab_size_divisible_by",),
    "the collective library follows the machine: NCCL on GPUs, gloo on CPUs": ("distributed_backend",),
    "--start-timeout-seconds and --update-weight-timeout-seconds bound what may hang": ("distributed_timeout_minutes",),
    "it is called --lr": ("learning_rate",),
}

FOREIGN: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""Why a name is refused, and what to do instead."""
