"""The trainer as it is, rank by rank, under layouts and set-ups that meet nowhere else: two steps of each job.

Only the samples are made without a model; weights go over the wire into an engine that computes with what it got, so
every publication's checksums and probe say that it is the trainer's model. One launch of two ranks for all of it.
`HEADRACE_WHOLE_RUNS=all` adds runs whose set-up and whose layout other runs have already.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.models.folders import QuantizedForm, is_whole
from headrace.process.scratch import memory_folder
from services.trainer.weights.quantization import quantized
from tests.long_forms import ALL
from tests.support.devices.shared_device import SharedDevice
from tests.support.devices.weights_engine import WeightsEngine
from tests.support.fakes.gloo_engine import GlooEngine
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_variants import make_fp8
from tests.support.ranks.rank_results import weights
from tests.support.ranks.ranks import Sections, run_cases
from tests.support.ranks.trainer_cases import NUM_STEPS, served

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2": {},
    "dp2-distributed": {"use_distributed_optimizer": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": PP2,
    "vpp2": VPP2,
    "ep2": EP2,
    "cp2": CP2,
    "cp2-ep2": CP2 | EP2,
}
SET_UPS: Mapping[str, tuple[str, Sections]] = {
    "reference": (
        "qwen3",
        {
            "train": {"use_kl_loss": True, "kl_loss_coef": 0.1, "num_steps_per_rollout": 2, "ref_update_interval": 1},
            "model": {"ref_load": "{folder}/reference"},
        },
    ),
    "critic": (
        "qwen3",
        {
            "train": {"advantage_estimator": "ppo", "kl_coef": 0.2},
            "critic": {"critic_lr": 1e-2},
            "model": {"ref_load": "{folder}/reference"},
        },
    ),
    "moonlight": ("moonlight", {}),
    "lora": ("qwen3", {"lora": {"lora_rank": 4}}),
    "disk": (
        "qwen3",
        {"publish": {"update_weight_transport": "disk", "update_weight_disk_path": "{folder}/shared-weights"}},
    ),
    "ipc": ("qwen3", {"publish": {"update_weight_transport": "ipc"}}),
    "fp8": ("qwen3-fp8", {"publish": {"update_weight_probe_tolerance": 1.0}}),
    "kimi_k2": ("kimi_k2", {}),
}
COLOCATED = "colocated@dp2"
IN_TURNS: Sections = {
    "placement": {"colocate": True, "offload_train": True, "offload_rollout": True},
    "publish": {"update_weight_transport": "ipc", "update_weight_probe_tolerance": 1e6},
    "checkpoint": {"save_interval": 1},
}
"""As a job with --colocate is resolved; its engine holds memory, and has no model."""
TWO_MACHINES = "two-machines@dp2"
ON_EACH_OF_TWO: Sections = IN_TURNS | {
    "publish": IN_TURNS["publish"]
    | {"update_weight_transport": "disk", "update_weight_disk_path": "{folder}/shared-weights"},
}
"""Each machine has a rank, a device, and a rollout service with an engine."""
RUNS = [
    *("reference@dp2", "critic@cp2", "kimi_k2@cp2-ep2", "lora@tp2", "disk@dp2", "ipc@dp2", "fp8@tp2"),
    *(("reference@vpp2", "critic@dp2", "critic@vpp2", "moonlight@dp2-distributed", "moonlight@vpp2") if ALL else ()),
    *(("kimi_k2@pp2", "disk@tp2", "disk@vpp2", "ipc@vpp2", "fp8@vpp2") if ALL else ()),
]
BASELINES = {run.split("@")[0]: run for run in reversed(RUNS)}
"""Each set-up's first run."""
MOVED = [run for run in RUNS if run not in BASELINES.values()]
COMPARED = {"loss/policy", "loss/kl", "grad_norm", "critic/loss", "critic/value", "critic/grad_norm"}


@dataclass(frozen=True)
class Runs:
    """What they left: in the folder, and in the engines."""

    folder: Path
    served: Mapping[str, Sequence[Mapping[str, Tensor]]]
    """What each rollout service's engine got last."""

    def metrics(self, run: str) -> list[dict[str, float]]:
        """Of each step."""
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def exported(self, run: str) -> dict[str, Tensor]:
        """The final weights."""
        return weights(self.folder / run / "export")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("trainers")
    for family in {SET_UPS[set_up][0] for set_up in BASELINES} - {"qwen3-fp8"}:
        make_tiny(folder / family, family, num_layers=4)
    make_fp8(folder / "qwen3", folder / "qwen3-fp8")
    make_tiny(folder / "reference", "qwen3", num_layers=4, seed=8)
    return Runs(folder, asyncio.run(_run(folder)))


async def _run(folder: Path) -> Mapping[str, Sequence[Mapping[str, Tensor]]]:
    async with AsyncExitStack() as stack:
        cases = []
        for run in RUNS:
            set_up, layout = run.split("@")
            family, sections = SET_UPS[set_up]
            filled = json.loads(json.dumps(sections).replace("{folder}", str(folder)))
            filled |= {"megatron": LAYOUTS[layout]}
            cases.append(await stack.enter_async_context(served(run, folder, folder / family, filled)))
        for run, sections, names in (
            (COLOCATED, IN_TURNS, ["device"]),
            (TWO_MACHINES, ON_EACH_OF_TWO, ["machine-0", "machine-1"]),
        ):
            devices = [SharedDevice(folder / name) for name in names]
            filled = json.loads(json.dumps(sections).replace("{folder}", str(folder)))
            cases.append(
                await stack.enter_async_context(served(run, folder, folder / "qwen3", filled, devices=devices))
            )
        await asyncio.to_thread(run_cases, folder, 2, [case for case, _ in cases], 1700.0)
        return {case.name: [dict(_served(rollout.engine)) for rollout in rollouts] for case, rollouts in cases}


def _served(engine: GlooEngine) -> Mapping[str, Tensor]:
    return engine.last_loaded if isinstance(engine, WeightsEngine) else engine.tensors


@pytest.mark.parametrize(
    ("run", "devices"), [(COLOCATED, ["device"]), (TWO_MACHINES, ["machine-0", "machine-1"])], ids=["one", "two"]
)
def test_trainer_and_engines_take_turns_on_their_device_and_nothing_else_changes(
    runs: Runs, run: str, devices: list[str]
) -> None:
    """A machine's device would have refused whoever came while the other side had memory there."""
    to_engines = ["ranks give", "engine-0 takes", "engine-0 loads"]
    to_trainer = ["engine-0 gives", "ranks take"]
    for device in devices:
        turns = [name for name, _ in itertools.groupby(map(_side, SharedDevice(runs.folder / device).events))]
        assert turns == ["ranks take", *to_engines, *NUM_STEPS * [*to_trainer, *to_engines], *to_trainer]
    apart, shared = (runs.exported(each) for each in ("ipc@dp2", run))
    assert [name for name in apart if not apart[name].equal(shared[name])] == []
    for engine in runs.served[run]:
        assert [name for name in apart if not apart[name].equal(engine[name])] == []
    assert [{name: row[name] for name in COMPARED & row.keys()} for row in runs.metrics(run)] == [
        {name: row[name] for name in COMPARED & row.keys()} for row in runs.metrics("ipc@dp2")
    ]


def _side(event: str) -> str:
    holder, what = event.split()
    return f"ranks {what.removesuffix('s')}" if holder.startswith("rank-") else event


@pytest.mark.parametrize("run", RUNS)
def test_a_run_trains_every_step_and_the_engines_have_its_final_weights(runs: Runs, run: str) -> None:
    assert [row["step"] for row in runs.metrics(run)] == list(range(1, NUM_STEPS + 1))
    exported, (served,) = runs.exported(run), runs.served[run]
    family = SET_UPS[run.split("@")[0]][0]
    form = QuantizedForm.of(runs.folder / family)
    sent = dict(quantized(form, iter(exported.items()))) if form else exported
    assert sent.keys() == served.keys()
    assert [name for name in sent if not sent[name].view(torch.uint8).equal(served[name].view(torch.uint8))] == []
    before = weights(runs.folder / (f"{family}-exact" if form else family))
    assert exported.keys() == before.keys()
    unmoved = [name for name in exported if exported[name].equal(before[name])]
    assert not memory_folder(runs.folder / run).exists()
    if run.startswith("lora@"):
        assert {name for name in exported if not name.endswith("_proj.weight")} == set(unmoved)
    else:
        assert all(name.endswith("e_score_correction_bias") for name in unmoved)


THROUGH_FILES = [*(run for run in RUNS if run.startswith("disk@")), TWO_MACHINES]


@pytest.mark.parametrize("run", THROUGH_FILES)
def test_through_files_the_served_version_lies_there_once_and_whole(runs: Runs, run: str) -> None:
    noted = (runs.folder / run / "written-weights.jsonl").read_text()
    (version,) = (each for each in (runs.folder / "shared-weights").iterdir() if each.name in noted)
    assert version.name.startswith(f"e1-v{NUM_STEPS}-")
    assert is_whole(version)
    files = sorted(version.glob("*.safetensors"))
    assert len(files) > 2, "of update_weight_buffer_size each, from every stage"
    names = [name for file in files for name in load_file(file)]
    assert sorted(names) == sorted(runs.exported(run)), "each tensor once"
    lying = weights(version)
    assert [name for name, tensor in runs.exported(run).items() if not tensor.equal(lying[name])] == []


@pytest.mark.parametrize("run", MOVED)  # make chaos
def test_a_run_does_not_depend_on_its_layout(runs: Runs, run: str) -> None:
    baseline = BASELINES[run.split("@")[0]]
    for mine, theirs in zip(runs.metrics(run), runs.metrics(baseline), strict=True):
        assert mine.keys() == theirs.keys()
        for name in COMPARED & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    expected = runs.exported(baseline)
    for name, weight in runs.exported(run).items():
        assert (weight - expected[name]).norm() < 1e-5 * expected[name].norm(), name
