"""Divides model and data over the trainer's processes: torch.distributed and Megatron's parallel state."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import MegatronArgs
from headrace.job.model.virtual_stages import virtual_stages
from headrace.models.architecture import Architecture
from services.trainer.megatron import cpu_adapter, rendezvous
from services.trainer.plan.context import Context

# A collective that takes longer has lost a peer.
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
FILES_TIMEOUT = datetime.timedelta(minutes=60)
"""How long one rank may write its part of a checkpoint after the first has written its own."""

_SEEDS_PER_STAGE = 100
"""The distance between the seeds of two pipeline stages, as in Megatron's own trainer."""
_NUMPYS_SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Layout:
    """This process's place, and the sizes of every dimension."""

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vpp_size: int
    """Virtual stages of each pipeline rank; 1: the rank's layers lie one behind the other."""
    dp_rank: int
    """Counts Megatron's data-parallel ranks: those of a context group are neighbours among them."""
    dp_size: int
    context: Context
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    edp_rank: int
    """Counts the ranks that hold the same expert."""
    edp_size: int
    files_group: dist.ProcessGroup
    """All ranks, on CPUs: what they tell each other of files, in threads that compute nothing."""
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    """Ranks with different samples: one of each context group."""
    pp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    """Ranks that hold different experts of the same layers."""
    etp_group: dist.ProcessGroup
    """Ranks that share each expert; the tensor ranks, unless expert_tensor_parallel_size says otherwise."""

    @property
    def is_first_stage(self) -> bool:
        """True when this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True when this rank holds the output layer, and so sees log-probs."""
        return self.pp_rank == self.pp_size - 1

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches in a pass is a multiple of this: Megatron interleaves whole rounds of ranks."""
        return self.pp_size if self.vpp_size > 1 else 1

    @property
    def data_rank(self) -> int:
        """Counts the shares of a batch."""
        return self.dp_rank // self.context.size

    @property
    def data_size(self) -> int:
        """The number of shares into which a batch is divided."""
        return self.dp_size // self.context.size

    @property
    def speaks(self) -> bool:
        """One of the ranks that know the same of the same samples."""
        return self.tp_rank == 0 and self.context.rank == 0

    @property
    def gathers(self) -> bool:
        """Takes part in putting whole tensors together. Experts are spread over data ranks: then all do."""
        return self.ep_size > 1 or self.dp_rank == 0

    @property
    def name(self) -> str:
        """Its name in a checkpoint: tp2-pp1-dp2, or with further divisions tp1-pp2-dp2-cp2-ep2-vpp2."""
        further = {"cp": self.context.size, "ep": self.ep_size, "vpp": self.vpp_size}
        return f"tp{self.tp_size}-pp{self.pp_size}-dp{self.dp_size}" + "".join(
            f"-{name}{size}" for name, size in further.items() if size > 1
        )


def initialize(
    args: MegatronArgs, architecture: Architecture, seed: int, options: Mapping[str, str] | None = None
) -> Layout:
    """Joins the other ranks, or is alone. In the thread that will compute.

    Raises ConfigError where machines that each start their own ranks have different `options`.
    """
    from megatron.core import parallel_state

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        # Where each process sees only its own GPU (Ray, Slurm with --gpus-per-task), it is number 0.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        refuse_gpu_only(args)
        refuse_divided_experts(args)
        cpu_adapter.install()
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} ranks cannot be divided into tensor_model_parallel_size {args.tensor_model_parallel_size} × "
            f"pipeline_model_parallel_size {args.pipeline_model_parallel_size} × context_parallel_size "
            f"{args.context_parallel_size}: use a multiple of {model_parallel}"
        )
    _require_room_for_experts(args, world_size)
    vpp_size = virtual_stages(architecture, args)
    rendezvous.join(rank, world_size, "nccl" if has_cuda else "gloo", _COLLECTIVE_TIMEOUT, options)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    _seed(seed + _SEEDS_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank(), device)
    context, data_group = _contexts(args, parallel_state.get_data_parallel_group(), world_size, device)
    return Layout(
        rank=rank,
        world_size=world_size,
        device=device,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=args.tensor_model_parallel_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=args.pipeline_model_parallel_size,
        vpp_size=vpp_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        context=context,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=args.expert_model_parallel_size,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        edp_rank=parallel_state.get_expert_data_parallel_rank(),
        edp_size=parallel_state.get_expert_data_parallel_world_size(),
        files_group=dist.new_group(backend="gloo", timeout=FILES_TIMEOUT),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        data_group=data_group,
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
    )


def _seed(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of hooks: nothing of ours draws any. A checkpoint brings its own states instead."""
    random.seed(seed)
    numpy.random.seed(seed % _NUMPYS_SEEDS)
    torch.manual_seed(seed)
    if device.type == "cuda":
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _contexts(
    args: MegatronArgs, dp_group: dist.ProcessGroup, world_size: int, device: torch.device
) -> tuple[Context, dist.ProcessGroup]:
    """Collective: this rank's context group, and the group of those that hold other samples."""
    size = args.context_parallel_size
    own = torch.tensor(dist.get_process_group_ranks(dp_group), device=device)
    every = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(every, own)
    # Every rank creates every group, in one order, whether it belongs to it or not.
    data_parallel = sorted({tuple(ranks.tolist()) for ranks in every})
    contexts = [ranks[i : i + size] for ranks in data_parallel for i in range(0, len(ranks), size)]
    others = [ranks[i::size] for ranks in data_parallel for i in range(size)]
    context, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in contexts])
    data, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in others])
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return Context(dist.get_rank(context), size, context, multiple), data


def _require_room_for_experts(args: MegatronArgs, world_size: int) -> None:
    within = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    needed = within * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if world_size % needed:
        raise ConfigError(
            f"{world_size} ranks cannot be divided into expert_model_parallel_size {args.expert_model_parallel_size} × "
            f"{within} tensor ranks × pipeline_model_parallel_size {args.pipeline_model_parallel_size}: use a multiple "
            f"of {needed}"
        )


def refuse_gpu_only(args: MegatronArgs) -> None:
    """Raises ConfigError for what Megatron-core does only on a GPU."""
    if flags := args.needs_gpu():
        raise ConfigError(f"{', '.join(flags)} needs a GPU, and mostly Transformer Engine: leave it out on a CPU")


def refuse_divided_experts(args: MegatronArgs) -> None:
    """Raises ConfigError where tensor ranks of an expert would gather what gloo cannot: unequally many tokens."""
    within = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.expert_model_parallel_size > 1 and within > 1:
        raise ConfigError(
            f"expert_model_parallel_size {args.expert_model_parallel_size} with {within} tensor ranks in each expert "
            "needs a GPU: gloo gathers only equal shares: pass --expert-tensor-parallel-size 1"
        )
