"""Over which machines and GPUs an engine lies: tables written by hand, and what `headrace check` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.view.plan import plan
from headrace.devices import DevicePlan, Wanted, machine_of, plan_devices
from headrace.errors import ConfigError
from headrace.job.engine_shape import EngineShape, engine_shapes
from headrace.job.load.resolve import resolve
from headrace.job.rules.production import check_engine_model
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.models.registry import PRESETS, architecture
from tests.support.models.tiny_families import tiny_config

ALL = "0,1,2,3,4,5,6,7"
DP = {"enable_dp_attention": True}

# GPUs of an engine, SGLang's arguments, GPUs of a machine → tensor, stages, attention's parts, machines, GPUs of each
SHAPES: list[tuple[int, dict[str, Any], int | None, tuple[int, int, int, int, int]]] = [
    (1, {}, None, (1, 1, 1, 1, 1)),
    (8, {}, None, (8, 1, 1, 1, 8)),
    (8, {}, 8, (8, 1, 1, 1, 8)),
    (4, {}, 8, (4, 1, 1, 1, 4)),
    (16, {}, 8, (16, 1, 1, 2, 8)),  # DeepSeek V3 in FP8
    (16, {"dp_size": 8, **DP}, 8, (16, 1, 8, 2, 8)),
    (16, {"dp_size": 16, **DP}, 8, (16, 1, 16, 2, 8)),
    (16, {"pp_size": 2}, 8, (8, 2, 1, 2, 8)),
    (16, {"pp_size": 4}, 8, (4, 4, 1, 2, 8)),
    (16, {"nnodes": 4}, 8, (16, 1, 1, 4, 4)),
    (32, {}, 8, (32, 1, 1, 4, 8)),  # Kimi K2
    (32, {"pp_size": 4}, 8, (8, 4, 1, 4, 8)),
    (32, {"pp_size": 2, "dp_size": 4, **DP}, 8, (16, 2, 4, 4, 8)),
    (32, {"dp_size": 32, **DP}, 8, (32, 1, 32, 4, 8)),
    (8, {"pp_size": 2}, 4, (4, 2, 1, 2, 4)),
    (6, {"pp_size": 3}, None, (2, 3, 1, 1, 6)),
    (6, {"pp_size": 3, "nnodes": 3}, None, (2, 3, 1, 3, 2)),
    (12, {}, 4, (12, 1, 1, 3, 4)),
    (2, {"nnodes": 2}, None, (2, 1, 1, 2, 1)),
    (4, {"pp_size": 4, "nnodes": 2}, None, (1, 4, 1, 2, 2)),
    (4, {"pp_size": 2, "nnodes": 4}, None, (2, 2, 1, 4, 1)),
]


@pytest.mark.parametrize(("devices", "sglang", "per_node", "expected"), SHAPES)
def test_an_engine_has_the_shape_that_the_table_says(devices, sglang, per_node, expected) -> None:
    shape = EngineShape.of(devices, sglang, per_node)
    assert (shape.tp_size, shape.pp_size, shape.dp_size, shape.nodes, shape.devices_per_node) == expected


REFUSED: list[tuple[int, dict[str, Any], int | None, tuple[str, ...]]] = [
    (8, {"pp_size": 3}, None, ("rollout_num_gpus_per_engine 8", "--sglang-pp-size 3")),
    (8, {"nnodes": 3}, None, ("rollout_num_gpus_per_engine 8", "3 machines", "--sglang-nnodes")),
    (10, {}, 4, ("rollout_num_gpus_per_engine 10", "3 machines of 4 GPUs", "--sglang-nnodes")),
    (16, {"nnodes": 1}, 8, ("--sglang-nnodes 1", "num_gpus_per_node is 8", "--sglang-nnodes 2 or more")),
    (24, {"nnodes": 2}, 8, ("12 GPUs of an engine", "--sglang-nnodes 3 or more")),
    (12, {"pp_size": 3, "nnodes": 2}, None, ("--sglang-pp-size 3", "2 machines", "multiple or a divisor")),
    (8, {"dp_size": 2}, None, ("--sglang-dp-size 2", "--rollout-num-gpus", "--sglang-enable-dp-attention")),
    (8, {"dp_size": 3, **DP}, None, ("--sglang-dp-size 3", "8 tensor ranks", "divisor")),
    (8, {"pp_size": 4, "dp_size": 4, **DP}, None, ("--sglang-dp-size 4", "2 tensor ranks")),
    (8, DP, None, ("--sglang-enable-dp-attention has no effect with --sglang-dp-size 1",)),
]


@pytest.mark.parametrize(("devices", "sglang", "per_node", "said"), REFUSED)
def test_sizes_that_do_not_divide_each_other_are_refused_with_the_way_out(devices, sglang, per_node, said) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineShape.of(devices, sglang, per_node)
    for words in said:
        assert words in refused.value.message


# machines x their GPUs, the trainer's machines x ranks, engines of (machines, GPUs of each) → who has which
PLACED = [
    # DeepSeek V3 in FP8: two engines of 2 x 8 beside a trainer of 4 x 8
    ((8, 8), (4, 8), [(2, 8)] * 2, [f"m4 {ALL} + m5 {ALL}", f"m6 {ALL} + m7 {ALL}"]),
    # Kimi K2: one engine of 4 x 8, the trainer elsewhere
    ((4, 8), (0, 0), [(4, 8)], [f"m0 {ALL} + m1 {ALL} + m2 {ALL} + m3 {ALL}"]),
    ((8, 8), (4, 8), [(4, 8)], [f"m4 {ALL} + m5 {ALL} + m6 {ALL} + m7 {ALL}"]),
    ((2, 8), (1, 8), [(1, 8)], [f"m1 {ALL}"]),
    ((2, 8), (2, 4), [(2, 4)], ["m0 4,5,6,7 + m1 4,5,6,7"]),
    ((2, 8), (1, 4), [(2, 4)], ["m0 4,5,6,7 + m1 0,1,2,3"]),
    ((2, 8), (1, 4), [(2, 4), (1, 4)], ["m0 4,5,6,7 + m1 0,1,2,3", "m1 4,5,6,7"]),
    ((2, 8), (1, 4), [(1, 4), (2, 4)], ["m1 4,5,6,7", "m0 4,5,6,7 + m1 0,1,2,3"]),
    ((3, 8), (1, 8), [(2, 8)], [f"m1 {ALL} + m2 {ALL}"]),
    ((3, 4), (0, 0), [(3, 4)], ["m0 0,1,2,3 + m1 0,1,2,3 + m2 0,1,2,3"]),
    ((5, 4), (1, 4), [(2, 2)] * 3, ["m1 0,1 + m2 0,1", "m1 2,3 + m2 2,3", "m3 0,1 + m4 0,1"]),
    # One machine, to try it: both parts are there
    ((1, 8), (1, 4), [(2, 2)], ["m0 4,5 + m0 6,7"]),
    ((1, 2), (0, 0), [(2, 1)], ["m0 0 + m0 1"]),
]


def plan_of(machines, trainer, engines) -> DevicePlan:
    count, each = machines
    there = [machine_of(f"m{number}", each) for number in range(count)]
    nodes, ranks = trainer
    return plan_devices(there, Wanted(nodes, ranks, [[gpus] * parts for parts, gpus in engines]))


@pytest.mark.parametrize(("machines", "trainer", "engines", "expected"), PLACED)
def test_each_machine_of_an_engine_gets_gpus_that_nobody_else_has(machines, trainer, engines, expected) -> None:
    plan = plan_of(machines, trainer, engines)
    assert [" + ".join(f"{s.machine} {s.visible}" for s in shares) for shares in plan.engines] == expected
    given = [(s.machine, d.name) for shares in (plan.trainer, *plan.engines) for s in shares for d in s.devices]
    assert len(set(given)) == len(given)


@pytest.mark.parametrize(
    ("machines", "trainer", "engines", "said"),
    [
        ((3, 8), (2, 8), [(2, 8)], "engine 0 on machine 2 of 2 wants 8 GPUs"),
        ((4, 8), (1, 8), [(4, 8)], "engine 0 on machine 4 of 4 wants 8 GPUs"),
        (
            (2, 8),
            (1, 4),
            [(2, 8)],
            "engine 0 on machine 2 of 2 wants 8 GPUs of one machine, and no machine has more than 4",
        ),
        (
            (1, 8),
            (1, 4),
            [(2, 4)],
            "engine 0 on machine 2 of 2 wants 4 GPUs of one machine, and no machine has more than 0",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_with_what_is_left(machines, trainer, engines, said) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(machines, trainer, engines)
    assert said in refused.value.message
    assert "--rollout-num-gpus" in refused.value.message


def test_groups_have_shapes_of_their_own() -> None:
    groups = [
        {"name": "large", "num_engines": 1, "num_gpus_per_engine": 16, "overrides": {"dp_size": 4, **DP}},
        {"name": "small", "num_engines": 2, "num_gpus_per_engine": 8},
    ]
    placement = {"engine_groups": groups, "num_gpus_per_node": 8}
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement, "sglang": {"page_size": 1}})
    assert engine_shapes(job) == [EngineShape(16, 1, 4, 2), EngineShape(8), EngineShape(8)]


LARGE = [
    (
        "deepseek-v3",
        {"actor_num_nodes": 4, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 16},
        {"dp_size": 8, **DP},
        "2 behind the router (manual), 16 tensor-parallel processes, their attention in 8 parts, on 2 machines in each",
        "; ".join(
            (
                *(f"trainer machine {number} GPU 0-7" for number in range(4)),
                "engine 0 machine 4 GPU 0-7 and machine 5 GPU 0-7",
                "engine 1 machine 6 GPU 0-7 and machine 7 GPU 0-7",
            )
        ),
    ),
    (
        "kimi-k2",
        {"actor_num_nodes": 2, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 32},
        {},
        "1 behind the router (manual), 32 tensor-parallel processes on 4 machines in each",
        "trainer machine 0 GPU 0-7; trainer machine 1 GPU 0-7; "
        "engine 0 machine 2 GPU 0-7 and machine 3 GPU 0-7 and machine 4 GPU 0-7 and machine 5 GPU 0-7",
    ),
]


@pytest.mark.parametrize(("name", "placement", "sglang", "engines", "gpus"), LARGE)
@pytest.mark.parametrize("starter", ["slurm", "ray"])
def test_check_shows_the_machines_of_large_engines(name, placement, sglang, engines, gpus, starter) -> None:
    placement |= {"actor_num_gpus_per_node": 8, "num_gpus_per_node": 8, "rollout_placement": starter}
    steps = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "num_rollout": 1}
    job = Job.model_validate(
        {"model": {"hf_checkpoint": name}, "placement": placement, "sglang": sglang, "rollout": steps}
    )
    shown = dict(plan(resolve(job), Scope(("buffer", "reward", "rollout", "trainer"), "--elsewhere")))
    assert (shown["engines"], shown["GPUs"]) == (engines, gpus)


_BROADCAST = ("--update-weight-transport", "collective")
CHECKED = (
    (
        (
            "--rollout-num-gpus-per-engine",
            "8",
            "--sglang-nnodes",
            "2",
            "--sglang-dp-size",
            "2",
            "--sglang-enable-dp-attention",
        ),
        ("--sglang-dp-size 2", "2 processes of this machine", "--rollout-placement slurm or ray"),
    ),
    (
        ("--rollout-num-gpus-per-engine", "8", "--sglang-dp-size", "2", "--sglang-enable-dp-attention"),
        ("--sglang-dp-size 2", "divides attention only on GPUs", "leave it out"),
    ),
    (
        (*_BROADCAST, "--rollout-num-gpus-per-engine", "8", "--sglang-pp-size", "2"),
        ("pp-size 2", "--update-weight-transport disk"),
    ),
    (("--sglang-tp-size", "2", "--sglang-pp-size", "2", "--rollout-num-gpus-per-engine", "2"), ("--sglang-tp-size 2",)),
)


@pytest.mark.parametrize(("flags", "said"), CHECKED)
def test_a_job_is_refused_whose_engines_could_not_take_its_weights(load_with, flags, said) -> None:
    with pytest.raises(ConfigError) as refused:
        load_with("--rollout-num-gpus", "8", *flags)
    for words in said:
        assert words in refused.value.message


@pytest.mark.parametrize(
    ("family", "what"),
    [("gpt_oss", "attention sinks"), ("qwen3_5_moe", "linear attention"), ("nemotron_h", "linear attention")],
)
def test_a_model_that_sglang_computes_on_gpus_alone_is_refused_where_there_is_none(load_with, family, what) -> None:
    found, here = architecture(tiny_config(family)), Scope(("rollout",))
    with pytest.raises(ConfigError, match=f"has {what}, which SGLang computes only on a GPU"):
        check_engine_model(load_with(), found, here)
    there = Scope(("rollout",), "--elsewhere")
    check_engine_model(load_with(), found, there)
    assert len(there.unchecked) == 1
    check_engine_model(load_with("--rollout-external-engine-addrs", "10.0.0.1:30000"), found, here)
    check_engine_model(load_with(), architecture(tiny_config("qwen3_moe")), here)
    with pytest.raises(ConfigError, match="NGRAM"):
        load_with("--sglang-speculative-algorithm", "NGRAM")


def test_angles_that_sglang_does_not_read_are_refused(load_with, model: Path) -> None:
    published = PRESETS["olmo-3-7B"].config
    check_engine_model(load_with(), architecture(published), Scope(("rollout",)))
    (model / "config.json").write_text(json.dumps(tiny_config("olmo3")))
    with pytest.raises(ConfigError, match="Write rope_theta and rope_scaling"):
        check_engine_model(load_with(), architecture(published), Scope(("rollout",)))
