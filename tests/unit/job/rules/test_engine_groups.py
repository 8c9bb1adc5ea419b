"""Groups of engines with arguments of their own: from the job file, from flags, from slime's YAML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.job.engine_shape import EngineShape
from headrace.job.load.load import load
from headrace.job.schema.job import to_toml
from headrace.job.schema.production import ContextLimit
from headrace.models.registry import read_architecture
from services.rollout.engine.fleet import EngineSlot
from services.rollout.fleet_build import slot_options, slots_of

GROUPS = """
[[placement.engine_groups]]
name = "long"
num_engines = 1
[placement.engine_groups.overrides]
context_length = 1500
max_running_requests = 4

[[placement.engine_groups]]
num_gpus = 2
"""
SLIME = """
sglang:
  - name: actor
    update_weights: true
    server_groups:
      - worker_type: regular
        num_gpus: 2
        overrides:
          context_length: 1500
          max_running_requests: 8
      - worker_type: regular
        num_gpus: 1
"""


def with_groups(job_file: Path, text: str = GROUPS) -> Path:
    job_file.write_text(job_file.read_text() + text)
    return job_file


def test_engine_groups_give_each_engine_the_arguments_of_its_group(job_file: Path) -> None:
    job = load(with_groups(job_file), ("--sglang-max-running-requests", "64"), {})
    assert (job.placement.num_engines, job.placement.rollout_num_gpus) == (3, 3)
    options = slot_options(job)
    assert [options(number).sglang for number in range(4)] == [
        {"max_running_requests": 4, "context_length": 1500},
        *[{"max_running_requests": 64}] * 3,
    ]
    assert [slots_of(job)(number) for number in range(4)] == [
        EngineSlot(EngineShape(1), "long"),
        *[EngineSlot(EngineShape(1), "group-2")] * 3,
    ]
    assert load(job_file, (), {}).placement == load_again(job_file, to_toml(load(job_file, (), {})))


def load_again(job_file: Path, text: str) -> object:
    resolved = job_file.with_name("resolved.toml")
    resolved.write_text(text)
    return load(resolved, (), {}).placement


def test_sglang_config_reads_slimes_file(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "engines.yaml").write_text(SLIME)
    for job in (
        load(job_file, ("--sglang-config", str(tmp_path / "engines.yaml")), {}),
        load(job_file, (), {"HEADRACE_SGLANG_CONFIG": str(tmp_path / "engines.yaml")}),
    ):
        assert [(g.name, g.count, g.overrides) for g in job.placement.engine_groups] == [
            ("group-1", 2, {"context_length": 1500, "max_running_requests": 8}),
            ("group-2", 1, {}),
        ]
        assert job.placement.sglang_config is None, "its groups are in the job now"
        assert job.placement.rollout_num_gpus == 3


def test_what_is_generated_fits_the_shortest_context(job_file: Path, model: Path) -> None:
    job = load(with_groups(job_file), (), {})
    limit = ContextLimit.of_engines(job.sglang, read_architecture(model), job.placement.engine_groups)
    assert (limit.tokens, limit.name) == (1500, "context_length of engine group long")
    with pytest.raises(ConfigError, match="rollout_max_prompt_len 1800 is not below 1500, context_length of engine gr"):
        load(job_file, ("--rollout-max-prompt-len", "1800"), {})
    short = ContextLimit.of_engines({"context_length": 512}, read_architecture(model), job.placement.engine_groups)
    assert (short.tokens, short.name) == (512, "--sglang-context-length")


def test_check_shows_the_groups(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(with_groups(job_file)), "--fast"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "long: 1 engine of 1 tensor-parallel processes, context_length 1500, max_running_requests 4" in printed
    assert "group-2: 2 engines of 1 tensor-parallel processes, the job's arguments" in printed


def one(**group: object) -> tuple[str, ...]:
    return ("--engine-groups", json.dumps({"num_engines": 1, **group}))


PARTS = (*one(worker_type="prefill", name="p"), *one(worker_type="decode", name="d"))
ABORT = ("--update-weight-pause-mode", "abort")


def test_prefill_and_decode_groups_are_planned_and_started_as_such(job_file: Path, tmp_path: Path, capsys) -> None:
    text = SLIME.replace("regular", "prefill", 1).replace("regular", "decode")
    (tmp_path / "engines.yaml").write_text(text)
    flags = ("--sglang-config", str(tmp_path / "engines.yaml"), "--sglang-disaggregation-transfer-backend", "nixl")
    job = load(job_file, (*flags, *ABORT), {})
    modes = [slot_options(job)(number).sglang["disaggregation_mode"] for number in range(3)]
    assert modes == [slots_of(job)(number).worker_type for number in range(3)] == ["prefill", "prefill", "decode"]
    main(["check", str(job_file), "--fast", *flags, *ABORT])
    printed = " ".join(capsys.readouterr().out.split())
    assert "group-1: 2 prefill engines of 1 tensor-parallel processes" in printed
    assert "group-2: 1 decode engine of 1 tensor-parallel processes" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*one(num_engines=2), "--rollout-num-gpus", "3"), "3 is not what the engine groups have, group-1 2 = 2"),
        (("--engine-groups", "{}"), "engine group group-1: say how large it is, by num_engines or num_gpus"),
        (("--engine-groups", '{"num_gpus": 3, "num_gpus_per_engine": 2}'), "num_gpus 3 cannot be divided by"),
        (one(num_gpu=3), "number 1, num_gpu: Extra inputs are not permitted, got 3"),
        (one(worker_type="placeholder"), "worker_type placeholder reserves GPUs without an engine"),
        (one(worker_type="prefill"), "of worker_type prefill: each request needs a prefill and a decode engine"),
        ((*one(), *PARTS), "of worker_type decode and prefill and regular: each request needs"),
        (PARTS, "update_weight_pause_mode in_place with prefill and decode groups: SGLang would say"),
        (
            (*PARTS, *ABORT, "--colocate", "--actor-num-gpus-per-node", "2"),
            "colocate with prefill and decode groups was never tried",
        ),
        (
            (*PARTS, *ABORT, "--keep-sampling-mask", "--rollout-top-p", "0.9"),
            "keep_sampling_mask with prefill and decode groups",
        ),
        (("--sglang-disaggregation-transfer-backend", "nixl"), "has no effect without prefill and decode groups"),
        ((*PARTS, *ABORT, "--sglang-disaggregation-bootstrap-port", "9"), "the worker_type of an engine group says it"),
        (one(overrides={"model_path": "m"}), "engine group group-1: --sglang-model-path cannot be given: set hf_che"),
        (one(overrides={"dtype": "float16"}), "dtype cannot be of a group, because all engines are given the same"),
        (one(overrides={"mem_fraction_static": 1.5}), "engine group group-1: --sglang-mem-fraction-static 1.5: should"),
        (one(overrides={"contxt_length": 5}), "group-1: overrides: SGLang has no argument contxt_length: did you mean"),
        ((*one(name="a"), "--engine-groups", '{"name": "a", "num_gpus": 1}'), "two engine groups are called a"),
        (
            (*one(num_gpus_per_engine=1), "--engine-groups", '{"num_engines": 1, "num_gpus_per_engine": 2}'),
            "engine groups of 1 and 2 GPUs per engine need GPUs, and this machine has none",
        ),
        ((*one(), "--rollout-external-engine-addrs", "10.0.0.7:1"), "engine_groups with rollout_external_engine_addrs"),
        ((*one(), "--sglang-config", "x.yaml"), "sglang_config and engine_groups both say what engines there are"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(load_with, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_with(*flags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: ref}]", "it has 2 models, 'a', 'ref': engines se"),
        ("sglang: [{name: a, model_path: /other, server_groups: [{num_gpus: 1}]}]", "model_path '/other' is not hf_ch"),
        (
            "sglang: [{name: a, server_groups: [{num_gpu: 1}]}]",
            "server group 1: 'num_gpu' is unknown: did you mean n",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: no}]}]", "server group 1: num_gpus: .*got False"),
        ("a: [b", "it is not YAML"),
        ("a: !!python/object/apply:os.system ['false']", "it is not YAML"),
        ("#" * (1 << 21), "it has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_list_of_groups_is_refused(job_file: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "engines.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(job_file, ("--sglang-config", str(tmp_path / "engines.yaml")), {})
