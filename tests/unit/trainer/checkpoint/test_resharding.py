"""A checkpoint of any layout restored under any other: the same weights and optimizer states, bit for bit.

One launch of four ranks; a case of fewer ranks runs on the first of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.models.family import Replicated
from headrace.models.registry import read_architecture, table
from services.trainer.checkpoint.checkpoint import whole_checkpoints
from services.trainer.checkpoint.resharding import CheckpointReader
from services.trainer.model.lora import pair_shardings
from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.offloading import FLAGS as OFFLOADS
from tests.support.ranks.rank_cases import Case
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
PRECISION_AWARE = DISTRIBUTED | {"use_precision_aware_optimizer": True}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "dp2-distributed": (2, DISTRIBUTED),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2-pp2": (4, TP2 | PP2),
}
OFFLOADED: dict[str, tuple[int, dict[str, object]]] = {
    "offloaded": (1, OFFLOADS),
    "offloaded-distributed": (2, OFFLOADS | DISTRIBUTED),
    "offloaded-aware": (2, OFFLOADS | PRECISION_AWARE),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ep2": (2, EP2),
    "ep2-distributed": (2, EP2 | DISTRIBUTED),
    "ep2-pp2": (4, EP2 | PP2),
    "ep4": (4, {"expert_model_parallel_size": 4}),
}
VIRTUAL_LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "vpp2": (2, VPP2),
    "vpp2-distributed": (4, VPP2 | DISTRIBUTED),
}
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if ALL or {a, b} == {"alone", "tp2-pp2"}]
"""Here and below `make chaos` has all of them."""
CHAINS = {
    "bf16": ["alone", "dp2-distributed", "tp2", *(["pp2"] if ALL else [])],  # master weights are cut, too
    "bf16-offloaded": ["alone", "offloaded-distributed", "offloaded-aware", "alone"],
    "float32-offloaded": ["offloaded", "alone", "offloaded"],
    "experts": ["alone", "ep2-distributed", *(["pp2", "ep4", "ep2-pp2"] if ALL else []), "alone"],
    "virtual": ["alone", "vpp2-distributed", *(["pp2", "vpp2", "tp2"] if ALL else []), "alone"],
    "critic": ["vpp2", "tp2-pp2", *(["dp2-distributed", "alone"] if ALL else [])],
    "lora": ["tp2", "pp2", *(["alone"] if ALL else [])],
}
"""Of layouts, each restored from the one before."""
HELD = {
    "bf16": ["model.norm.weight/main"],
    "bf16-offloaded": ["model.norm.weight/main"],
    "float32-offloaded": ["model.norm.weight/exp_avg"],
    "experts": ["model.layers.1.mlp.experts.3.down_proj.weight/exp_avg_sq"],
    "virtual": ["model.norm.weight/exp_avg"],
    "critic": ["output_layer.weight/exp_avg", "model.layers.3.mlp.down_proj.weight/exp_avg_sq"],
    "lora": [
        "model.layers.1.mlp.down_proj.lora_A.weight/exp_avg",
        "model.layers.1.mlp.down_proj.lora_B.weight/exp_avg_sq",
    ],
}
PPO = {"train": {"advantage_estimator": "ppo", "use_kl_loss": False}, "critic": {"critic_lr": 1e-2}}
ADAPTED = {"lora": {"lora_rank": 4}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    make_tiny(folder / "model", "qwen3", tied=True)
    cases = [_case(folder, f"float32@{name}", name) for name in dict(PAIRS)]
    cases += [_case(folder, f"float32@{a}@{b}", b, restores=f"float32@{a}") for a, b in PAIRS]
    make_tiny(folder / "experts", "qwen3_moe", tied=False)
    make_tiny(folder / "virtual", "qwen3", tied=True, num_layers=4)
    for name, chain in CHAINS.items():
        for place, layout in enumerate(chain):
            before = f"{name}@{place - 1}" if place else None
            cases.append(_case(folder, f"{name}@{place}", layout, restores=before))
    run_cases(folder, 4, cases)
    return folder


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_a_checkpoint_of_one_layout_is_the_same_under_another(runs: Path, written: str, read: str) -> None:
    original, resaved = _tensors(runs, f"float32@{written}"), _tensors(runs, f"float32@{written}@{read}")
    _assert_equal(original, resaved)
    assert {name.rpartition("/")[2] for name in original} == {"weight", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    ("chain", "place"), [(name, n) for name, chain in CHAINS.items() for n in range(1, len(chain))]
)
def test_every_state_comes_through_every_layout(runs: Path, chain: str, place: int) -> None:
    part = "critic" if chain == "critic" else "policy"
    model = {"experts": "experts", "virtual": "virtual", "critic": "virtual"}.get(chain, "model")
    original, resaved = (_tensors(runs, f"{chain}@{n}", model, part) for n in (place - 1, place))
    _assert_equal(original, resaved)
    for held in HELD[chain]:
        assert original[f"{part}/{held}"].any(), held
    if chain.startswith("bf16"):
        for name in (name for name in original if name.endswith("/weight")):
            assert torch.equal(original[name.removesuffix("weight") + "main"].bfloat16(), original[name]), name


def _assert_equal(original: dict[str, Tensor], resaved: dict[str, Tensor]) -> None:
    assert original.keys() == resaved.keys()
    for name, tensor in original.items():
        assert tensor.dtype == resaved[name].dtype, name
        assert torch.equal(tensor, resaved[name]), name


def _tensors(runs: Path, run: str, model: str = "model", part: str = "policy") -> dict[str, Tensor]:
    """Whole tensors of the run's checkpoint, cut nowhere."""
    found = whole_checkpoints(runs / run / "checkpoints")[0]
    reader = CheckpointReader(*found)
    shardings = {row.hf[0].name: row.sharding for row in table(read_architecture(runs / model)).rows()}
    for row in table(read_architecture(runs / model)).rows():
        for number, layer in enumerate(tensor.name.removesuffix(".weight") for tensor in row.hf):
            of_a, of_b = pair_shardings(row.sharding, number)
            shardings |= {f"{layer}.lora_A.weight": of_a, f"{layer}.lora_B.weight": of_b}
    tensors = {}
    for name in reader.names:
        if name.endswith("/step"):
            tensors[name] = reader.whole(name)
        elif name.startswith(f"{part}/"):
            elements = sum(place.end - place.start for place in found[1].places if place.tensor == name)
            sharding = shardings.get(name.split("/")[1], Replicated())  # a critic's head is whole everywhere
            tensors[name] = reader.run(name, sharding, 0, 1, 0, elements)
    return tensors


def _case(folder: Path, name: str, layout: str, *, restores: str | None = None) -> Case:
    ranks, parallel = (LAYOUTS | OFFLOADED | EXPERT_LAYOUTS | VIRTUAL_LAYOUTS)[layout]
    family = name.split("@")[0]
    model = {"experts": "experts", "virtual": "virtual", "critic": "virtual"}.get(family, "model")
    further: dict[str, Any] = {"critic": PPO, "lora": ADAPTED}.get(family, {})
    megatron: dict[str, object] = {"bf16": True} if family.startswith("bf16") else {}
    checkpoint = {} if restores is None else {"load": str(folder / restores / "checkpoints")}
    sections = {"megatron": parallel | megatron, "checkpoint": checkpoint, **further}
    return Case(name, str(folder), str(folder / model), sections, ranks, work="save")
