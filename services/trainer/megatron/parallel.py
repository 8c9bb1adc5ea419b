"""Divides model, data and rows over the trainer's processes: torch.distributed and Megatron's parallel state.

Context parallelism: several ranks hold parts of the same rows, and each computes what its own positions need. Megatron
is not told. To it these ranks are data-parallel: gradients are summed over all of them, optimizer shards and replicas
are divided as ever. A rank's queries see the keys of the whole row, gathered in every layer (as Llama 3 was trained,
https://arxiv.org/abs/2407.21783 §3.3.2), and what the parts predict is put together before the loss, which every rank
of the group computes whole.
"""

from __future__ import annotations

import datetime
import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import virtual_stages
from headrace.models.architecture import Architecture
from services.trainer.collective_io import gathered_bytes
from services.trainer.megatron import cpu_adapter, rendezvous
from services.trainer.plan.rows import Rows, RowSegment, Share


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's place in its context group."""

    rank: int
    size: int
    group: dist.ProcessGroup
    multiple: int = 1
    """Each part's length is a multiple of it: sequence parallelism divides it further."""

    def part(self, rows: Rows, logit_positions: Tensor, target_slots: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """This rank's positions of a single packed row, and those of them that predict a token.

        `logit_positions` [N] become positions in the part; `target_slots` [N] say as before which target each predicts.
        """
        if self.size == 1:
            return rows, logit_positions, target_slots
        if rows.segments is None:  # a row of one sample is one segment
            assert len(rows.tokens) == 1, "the rules refuse padded batches"
            rows = Rows(rows.tokens, rows.positions, (RowSegment(0, rows.tokens.shape[1]),))
        row = rows.aligned(2 * self.size * self.multiple)
        chunk = row.tokens.shape[1] // (2 * self.size)
        device = logit_positions.device
        everywhere = [_positions(self._spans(rank, chunk), device) for rank in range(self.size)]
        own = everywhere[self.rank]
        here = torch.full((row.tokens.shape[1],), -1, dtype=torch.int64, device=device)
        here[own] = torch.arange(len(own), device=device)
        found = here[logit_positions]
        mine = found >= 0
        share = Share(self._spans(self.rank, chunk), torch.cat(everywhere).argsort(), self.group)
        part = Rows(row.tokens[:, own], row.positions[:, own], row.segments, share)
        return part, found[mine], target_slots[mine]

    def total(self, part: Tensor) -> Tensor:
        """The sum over the group; its gradient reaches every rank's part as it is."""
        if self.size == 1:
            return part
        total: Tensor = reduce_from_tensor_model_parallel_region(part, group=self.group)
        return total

    def _spans(self, rank: int, chunk: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """One chunk from either end of the row: late positions see more keys, so that all ranks work alike."""
        first, last = rank * chunk, (2 * self.size - 1 - rank) * chunk
        return (first, first + chunk), (last, last + chunk)


def _positions(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in spans])


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
    data_group: dist.ProcessGroup
    """Ranks with different samples: one of each context group."""
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
    def is_reporting_rank(self) -> bool:
        """One of the ranks that know the same of the same samples."""
        return self.tp_rank == 0 and self.context.rank == 0

    @property
    def joins_gather(self) -> bool:
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
        cpu_adapter.install()
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} ranks cannot be divided into tensor_model_parallel_size {args.tensor_model_parallel_size} × "
            f"pipeline_model_parallel_size {args.pipeline_model_parallel_size} × context_parallel_size "
            f"{args.context_parallel_size}: use a multiple of {model_parallel}"
        )
    _check_experts(args, world_size, has_cuda)
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
        data_group=data_group,
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
    )


def _seed(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of hooks: nothing of ours draws any. A checkpoint brings its own states instead."""
    random.seed(seed)
    np.random.seed(seed % _NUMPYS_SEEDS)
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


def _check_experts(args: MegatronArgs, world_size: int, has_cuda: bool) -> None:
    within = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if not has_cuda and args.expert_model_parallel_size > 1 and within > 1:
        raise ConfigError(
            f"expert_model_parallel_size {args.expert_model_parallel_size} with {within} tensor ranks in each expert "
            "needs a GPU: gloo gathers only equal shares: pass --expert-tensor-parallel-size 1"
        )
    needed = within * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if world_size % needed:
        raise ConfigError(
            f"{world_size} ranks cannot be divided into expert_model_parallel_size {args.expert_model_parallel_size} × "
            f"{within} tensor ranks × pipeline_model_parallel_size {args.pipeline_model_parallel_size}: use a multiple "
            f"of {needed}"
        )


def gathered(mine: Any, layout: Layout) -> list[Any]:
    """Collective over all ranks: what each of them gave, as JSON, in the order of the ranks."""
    return [json.loads(each) for each in gathered_bytes(json.dumps(mine).encode(), None, layout.device)]


def told(mine: bytes, layout: Layout) -> bytes:
    """Collective over all ranks: what rank 0 gave; what others give is not looked at."""
    size = torch.tensor([len(mine)], dtype=torch.int64, device=layout.device)
    dist.broadcast(size, src=0)
    content = torch.empty(int(size), dtype=torch.uint8, device=layout.device)
    if layout.rank == 0:
        content.copy_(torch.from_numpy(np.frombuffer(mine, np.uint8).copy()))
    dist.broadcast(content, src=0)
    return content.cpu().numpy().tobytes()


def summed_by_name(mine: Mapping[str, float], layout: Layout) -> dict[str, float]:
    """Collective over all ranks: the sum under each name that any rank has."""
    found: dict[str, float] = defaultdict(float)
    for each in gathered(dict(mine), layout):
        for name, value in each.items():
            found[name] += value
    return dict(sorted(found.items()))
