"""What a spawned rank does in the tests of adapters in float64: log-probs, and the gradient of every A and B.

log_probs.json    of every sample, before training (last stage)
gradients-R.pt    of each rank R: by key, the sharding, the shard's number and its gradient
merged-R.pt       the weights that leave from rank R
published         the adapters as engines get them, where no expert has one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from headrace.trajectory import Sample
from tests.support.ranks import vision_cases
from tests.support.ranks.rank_cases import samples, train_once
from tests.support.ranks.ranks import RankCase, Sections


@dataclass(frozen=True)
class LoraCase(RankCase):
    """Supervised fine-tuning in one step of gradient descent, whose rate is 1."""

    plain: ClassVar[Sections] = {
        "rollout": {"num_rollout": 4, "rollout_temperature": 0.8},
        "train": {"micro_batch_size": 2, "num_steps_per_rollout": 1, "loss_type": "sft_loss"},
        "megatron": {
            "optimizer": "sgd",
            "lr": 1.0,
            "clip_grad": 0.0,
            "weight_decay": 0.0,
            "grad_reduce_in_fp32": False,
        },
    }

    patch_values: int | None = None
    """Of the samples' images; None: they have none."""

    @property
    def batch(self) -> list[Sample]:
        """What is trained."""
        return samples(0) if self.patch_values is None else vision_cases.samples(self.patch_values)

    def run(self) -> None:
        import torch.distributed as dist

        from services.trainer.control.senders import AdapterWriter
        from services.trainer.model import build
        from services.trainer.model.lora import Adapters, attach

        attached: list[tuple[Any, Adapters]] = []

        def remembered(model: Any, *given: Any) -> Adapters:
            attached.append((model, attach(model, *given)))
            return attached[0][1]

        with _float64(), mock.patch.object(build, "attach", remembered):
            policy, layout = self.policy()
        ((model, adapters),) = attached
        torch.save(dict(model.converter.hf_tensors()), self.out / f"merged-{layout.rank}.pt")
        if not any(".experts." in key for key in adapters.weights()):
            AdapterWriter(policy, layout, lambda _: False, root=self.out).send("published", {})
        found = policy.log_probs(self.batch)
        if layout.is_last_stage and layout.is_reporting_rank and layout.dp_rank == 0:
            (self.out / "log_probs.json").write_text(json.dumps([row.tolist() for row in found]))
        before = {key: parameter.detach().clone() for key, parameter in adapters.weights().items()}
        train_once(policy, 0, self.batch)
        gradients = {
            shard.key: (shard.sharding, shard.shard, before[shard.key] - shard.parameter.detach())
            for shard in adapters.shards
        }
        torch.save(gradients, self.out / f"gradients-{layout.rank}.pt")
        dist.barrier()


def _float64() -> Any:
    from services.trainer.hugging_face import rank_model
    from services.trainer.megatron.gpt import transformer_config

    def config(*given: Any) -> Any:
        made = transformer_config(*given)
        made.params_dtype = made.pipeline_dtype = torch.float64
        made.moe_router_dtype = "fp64"
        return made

    return mock.patch.object(rank_model, "transformer_config", config)


def gradients(case: Path) -> Mapping[str, Tensor]:
    """Whole, of all ranks. Ranks that hold the same have the same."""
    from services.trainer.hugging_face.shards import merge

    shards: dict[str, dict[int, Tensor]] = {}
    shardings = {}
    for file in sorted(case.glob("gradients-*.pt")):
        for key, (sharding, number, gradient) in torch.load(file, weights_only=False).items():
            other = shards.setdefault(key, {}).setdefault(number, gradient)
            assert torch.allclose(other, gradient, rtol=1e-9, atol=1e-12), key
            shardings[key] = sharding
    return {
        key: torch.cat(merge(shardings[key], [own[number] for number in sorted(own)])) for key, own in shards.items()
    }


def merged(case: Path) -> dict[str, Tensor]:
    """All weights as engines get them."""
    return {name: tensor for file in case.glob("merged-*.pt") for name, tensor in torch.load(file).items()}
