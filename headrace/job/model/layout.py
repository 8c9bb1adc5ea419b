"""Checks that a job's parallel sizes divide the model's layers, heads and experts."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import MegatronArgs
from headrace.models.architecture import Architecture

_CUT_BY_TENSOR_RANKS = ("vocab_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")


def check_layout(architecture: Architecture, args: MegatronArgs) -> None:
    """Raises ConfigError for the first size that does not divide its number of layers, heads or experts."""
    _tensor(architecture, args)
    _pipeline(architecture, args)
    _experts(architecture, args)


def _tensor(architecture: Architecture, args: MegatronArgs) -> None:
    ranks = args.tensor_model_parallel_size
    for name in _CUT_BY_TENSOR_RANKS:
        size = getattr(architecture, name)
        if size % ranks:
            raise ConfigError(
                f"tensor_model_parallel_size {ranks} does not divide {name} {size}: choose a divisor of it",
                field="tensor_model_parallel_size",
            )


def _pipeline(architecture: Architecture, args: MegatronArgs) -> None:
    if (
        args.pipeline_model_parallel_layout
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    ):
        return
    stages = args.pipeline_model_parallel_size
    ends = (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage)
    given = [layers for layers in ends if layers is not None]
    if (architecture.num_layers - sum(given)) % max(1, stages - len(given)):
        raise ConfigError(
            f"pipeline_model_parallel_size {stages} does not divide num_layers {architecture.num_layers}: "
            "choose a divisor of it, or pass --num-layers-in-last-pipeline-stage",
            field="pipeline_model_parallel_size",
        )


def _experts(architecture: Architecture, args: MegatronArgs) -> None:
    ranks = args.expert_model_parallel_size
    if architecture.experts is None:
        if ranks > 1:
            raise ConfigError(
                f"expert_model_parallel_size {ranks}: this {architecture.family} model has no experts: leave it out",
                field="expert_model_parallel_size",
            )
        return
    if architecture.experts.count % ranks:
        raise ConfigError(
            f"expert_model_parallel_size {ranks} does not divide the {architecture.experts.count} experts: "
            "choose a divisor of it",
            field="expert_model_parallel_size",
        )
    tensor = args.tensor_model_parallel_size
    if tensor > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size {tensor} with experts: Megatron-core trains them only with "
            "--sequence-parallel: add it, or divide the experts alone: "
            f"--expert-model-parallel-size {tensor}",
            field="sequence_parallel",
        )
