from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError, Unavailable
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.services import BufferSection
from services.rollout.engine import arguments
from services.rollout.engine.arguments import Machine
from services.rollout.fleet_build import engine_options

FLAGS = {
    name: (
        f"--{name.replace('_', '-')}",
        not name.startswith("disable")
        and name not in ("sleep_on_idle", "skip_server_warmup", "enable_priority_scheduling", "enable_memory_saver"),
    )
    for name in (
        *("device", "attention_backend", "sampling_backend", "disable_overlap_schedule", "skip_server_warmup"),
        *("sleep_on_idle", "max_total_tokens", "max_running_requests", "dtype", "model_path", "tp_size", "host"),
        *("port", "weight_version", "random_seed", "base_gpu_id", "mem_fraction_static", "enable_metrics"),
        *("enable_priority_scheduling", "default_priority_value", "load_snapshot_publish_interval"),
        "enable_memory_saver",
    )
}
CPU = Machine(has_accelerator=False, flags=FLAGS)
GPU = Machine(has_accelerator=True, flags=FLAGS)


def job(**sglang: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": Path("/m")}, "sglang": sglang})


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"-statik is no argument .* did you mean --sglang-mem-fraction-static"):
        arguments.check({"mem_fraction_statik": 0.5}, CPU)


def test_rollout_num_gpus_per_engine_is_the_tensor_parallel_size_of_an_engine() -> None:
    placement = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    told = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement})
    words = arguments.words(engine_options(told), CPU, engine=0, port=5)
    assert words[words.index("--tp-size") + 1] == "2"


def test_without_an_accelerator_the_cpu_recipe_is_chosen_and_the_job_may_change_it() -> None:
    words = arguments.words(
        engine_options(job(max_total_tokens=1024, disable_overlap_schedule=False)), CPU, engine=1, port=5
    )
    assert words[words.index("--device") + 1] == "cpu"
    assert words[words.index("--max-total-tokens") + 1] == "1024"
    assert words[words.index("--random-seed") + 1] == "43"
    assert "--sleep-on-idle" in words
    assert "--disable-overlap-schedule" not in words


def test_with_an_accelerator_engines_are_laid_out_over_it() -> None:
    words = arguments.words(engine_options(job()), GPU, engine=3, port=5)
    assert "--device" not in words
    assert words[words.index("--base-gpu-id") + 1] == "3"
    assert "OMP_NUM_THREADS" not in arguments.environment(engine_options(job()), has_accelerator=True)


@pytest.mark.parametrize(("megatron", "dtype"), [({}, "float32"), ({"bf16": True}, "bfloat16")])
def test_an_engine_serves_the_dtype_that_is_published(tmp_path: Path, megatron: dict[str, object], dtype: str) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float16", "torch_dtype": "float16"}')
    told = Job.model_validate({"model": {"hf_checkpoint": tmp_path}, "megatron": megatron})
    words = arguments.words(engine_options(told), GPU, engine=0, port=5)
    assert words[words.index("--dtype") + 1] == dtype


def test_with_offload_rollout_engines_on_gpus_can_give_up_their_memory() -> None:
    placement = {"colocate": True, "offload_rollout": True}
    told = engine_options(Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement}))
    assert "--enable-memory-saver" in arguments.words(told, GPU, engine=0, port=5)
    assert "--enable-memory-saver" not in arguments.words(told, CPU, engine=0, port=5), "SGLang has none there"
    assert "--enable-memory-saver" not in arguments.words(engine_options(job()), GPU, engine=0, port=5)


@pytest.mark.parametrize(("engines", "max_staleness", "threads"), [(2, 0, "4"), (12, 1, "1")])
def test_engines_share_the_cores_and_leave_half_to_a_trainer_that_works_meanwhile(
    monkeypatch: pytest.MonkeyPatch, engines: int, max_staleness: int, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    shared = job().model_copy(
        update={
            "placement": PlacementSection(rollout_num_gpus=engines),
            "buffer": BufferSection(max_staleness=max_staleness),
        }
    )
    assert arguments.environment(engine_options(shared), has_accelerator=False)["OMP_NUM_THREADS"] == threads


async def test_a_torch_for_cpus_alone_has_no_accelerator_and_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(arguments, "_ASK", "raise SystemExit('torch was asked')")
    assert not await arguments.has_accelerator()
    monkeypatch.setattr(arguments, "version", lambda _: "2.13.0+cu130")
    with pytest.raises(Unavailable, match="torch was asked"):
        await arguments.has_accelerator()


@pytest.mark.parametrize(
    ("sglang", "of_others", "of_evaluations"),
    [
        ({"enable_priority_scheduling": True, "default_priority_value": 5}, "5", 4),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, "0", 1),
    ],
)
def test_engines_that_schedule_by_priority_take_evaluations_last(
    sglang: dict[str, object], of_others: str, of_evaluations: int
) -> None:
    flags = {**FLAGS, "schedule_low_priority_values_first": ("--schedule-low-priority-values-first", False)}
    words = arguments.words(engine_options(job(**sglang)), Machine(False, flags), engine=0, port=5)
    assert words[words.index("--default-priority-value") + 1] == of_others
    assert arguments.evaluation_priority(sglang) == of_evaluations
