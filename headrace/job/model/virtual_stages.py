"""Computes how many virtual stages a pipeline rank has.

Ranks alternate between these stretches of layers and so wait less for each other (interleaved schedule,
https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import MegatronArgs
from headrace.models.architecture import Architecture

_OTHER_CUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def virtual_stages(architecture: Architecture, args: MegatronArgs) -> int:
    """The number of stages on each rank; 1 when the job asks for none.

    Raises ConfigError when the layers cannot be divided in this way. Megatron itself checks stages of uneven length.
    """
    if args.num_layers_per_virtual_pipeline_stage is not None:
        stages = _of_so_many_layers(args.num_layers_per_virtual_pipeline_stage, architecture.num_layers, args)
    else:
        stages = args.virtual_pipeline_model_parallel_size or 1
        if not _cuts_otherwise(args):
            _require_divisor(stages, architecture.num_layers, args.pipeline_model_parallel_size)
    if stages > 1 and args.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{stages} virtual stages on one pipeline rank have no effect: pass "
            "--pipeline-model-parallel-size 2 or more, or leave them out"
        )
    return stages


def _of_so_many_layers(layers: int, num_layers: int, args: MegatronArgs) -> int:
    if args.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            "num_layers_per_virtual_pipeline_stage and num_virtual_stages_per_pipeline_rank set the "
            "same thing: give only one",
            field="num_layers_per_virtual_pipeline_stage",
        )
    if cut := _cuts_otherwise(args):
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {layers} with {', '.join(cut)}: the stages would differ in "
            f"length: pass "
            "--num-virtual-stages-per-pipeline-rank",
            field="num_layers_per_virtual_pipeline_stage",
        )
    ranks = args.pipeline_model_parallel_size
    if num_layers % (ranks * layers):
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {layers} x pipeline_model_parallel_size {ranks} does not divide "
            f"num_layers {num_layers}: choose a divisor of {num_layers / ranks:g}",
            field="num_layers_per_virtual_pipeline_stage",
        )
    return num_layers // (ranks * layers)


def _require_divisor(stages: int, num_layers: int, ranks: int) -> None:
    if stages > 1 and num_layers % (ranks * stages):
        raise ConfigError(
            f"num_virtual_stages_per_pipeline_rank {stages} x pipeline_model_parallel_size {ranks} does not divide "
            f"num_layers {num_layers}: choose a divisor of {num_layers / ranks:g}",
            field="virtual_pipeline_model_parallel_size",
        )


def _cuts_otherwise(args: MegatronArgs) -> list[str]:
    return [name for name, value in args.given(frozenset(_OTHER_CUTS)).items() if value]
