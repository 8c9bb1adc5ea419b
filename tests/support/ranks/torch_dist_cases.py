"""Two ranks that are Megatron-core alone, or headrace, and give each other checkpoints.

saved      plain Megatron-core, in one layout, saves random weights and its logits of TOKENS
started    headrace starts from that folder in another layout, exports, and saves a checkpoint of its own
loaded     plain Megatron-core loads what one process exported from that, and saves its logits
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = [7, 300, 12, 5, 99, 41, 41, 260, 3, 18, 77, 150]
DENSE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32}
MIXED = DENSE | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": [1, 1]}


@dataclass(frozen=True)
class TorchDistCase:
    """`plain` is Megatron's layout, `headrace` that of the job; in `folder` are the model and all results."""

    folder: str
    plain: Mapping[str, int]
    headrace: Mapping[str, int]
    model: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    """Further folders with the same weights, each under the names that these facts of Megatron lead to."""
    option: str = "initial_megatron_checkpoint"
    """The job's name for Megatron's folder."""

    def run(self) -> None:
        """In every rank at once."""
        folder = Path(self.folder)
        _in_layout(self.plain, lambda: _save(self, folder))
        _started(self, folder)
        _in_layout(self.plain, lambda: _load(self, folder))


def _job(case: TorchDistCase, folder: Path) -> Any:
    """A job that starts from what plain Megatron-core saved, and has it as its reference too."""
    from headrace.job.schema.job import Job

    return Job.model_validate(
        {
            "model": {"hf_checkpoint": str(folder / "model"), "ref_load": str(folder / "plain")},
            "train": {"use_kl_loss": True, "kl_loss_coef": 0.1},
            "megatron": dict(case.headrace),
            "checkpoint": {"save": str(folder / "own"), case.option: str(folder / "plain")},
        }
    )


def _save(case: TorchDistCase, folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    model = _plain_model(case, seed=1)
    _write_logits(model, folder / "saved.json")
    target = folder / "plain" / "iter_0000005"
    for path, facts in {target: {}, **{folder / name: facts for name, facts in case.variants.items()}}.items():
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        model.config.moe_layer_freq = facts.get("moe_layer_freq", model.config.moe_layer_freq)
        sharded = model.sharded_state_dict(metadata=facts.get("metadata"))
        args = Namespace(**case.model, norm_epsilon=1e-6, rotary_base=10000)
        dist_checkpointing.save({"model": sharded, "args": args, "iteration": 5}, str(path))
    if dist.get_rank() == 0:
        (folder / "plain" / "latest_checkpointed_iteration.txt").write_text("5")


def _started(case: TorchDistCase, folder: Path) -> None:
    from megatron.core import parallel_state

    from headrace.models.torch_dist import FORMAT
    from services.trainer.checkpoint.checkpoint import Checkpoints, step_name
    from services.trainer.export_checkpoint import export_checkpoint
    from services.trainer.model.build import join_ranks, policy_of

    job = _job(case, folder)
    layout = join_ranks(job)
    policy = policy_of(job, layout)
    policy.export(folder / "exported")
    checkpoints = Checkpoints(job.checkpoint, folder, layout)
    assert checkpoints.restore_latest(policy.saved) == 0
    checkpoints.save(policy.saved, step=1, policy_version=1, epoch=1)
    _leave()
    if layout.rank == 0:
        world_size, os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"], "1"
        export_checkpoint(job, folder / "own" / step_name(1), folder / "for-megatron", FORMAT)
        os.environ["WORLD_SIZE"] = world_size
        if parallel_state.is_initialized():
            _leave()


def _load(case: TorchDistCase, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    model = _plain_model(case, seed=2)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "for-megatron" / "release"))
    model.load_state_dict(loaded["model"])
    _write_logits(model, folder / "loaded.json")


def _in_layout(sizes: Mapping[str, int], work: Callable[[], None]) -> None:
    """Joins the ranks as Megatron-LM does; of headrace there is only what stands for CUDA on a CPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.megatron import cpu_adapter
    from services.trainer.megatron.rendezvous import RENDEZVOUS

    cpu_adapter.install()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"{os.environ[RENDEZVOUS]}-plain"
    number = len(list(Path(meeting).parent.glob(f"{Path(meeting).name}-left-{rank}-*")))
    dist.init_process_group("gloo", init_method=f"file://{meeting}-{number}", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(**sizes)
    work()
    dist.barrier()
    _leave()
    Path(f"{meeting}-left-{rank}-{number}").touch()


def _leave() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _plain_model(case: TorchDistCase, seed: int) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(
        **case.model,
        ffn_hidden_size=96,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.15,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=320,
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def _write_logits(model: Any, path: Path) -> None:
    import torch
    import torch.distributed as dist

    tokens = torch.tensor([TOKENS])
    size = len(TOKENS)
    mask = torch.ones(1, 1, size, size).triu(1).bool()
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(size)[None], mask)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(logits[0].tolist()))
