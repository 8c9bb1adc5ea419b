"""Every option that the trainer reads outside of its model is in the parts that are built of a job, with its value."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import services.trainer
from headrace.job.schema.job import Job
from headrace.limits import PEER_WAIT_SECONDS
from headrace.publication import TensorSpec
from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control import build
from services.trainer.control.build import Built, TrainerBuild
from services.trainer.control.channel import Channel
from services.trainer.control.ranks import RankGroup
from services.trainer.megatron.parallel import Layout
from tests.support.job_options import Readers, ignored, options_named_in, options_read

LAYOUT = cast(
    Layout,
    SimpleNamespace(
        device=torch.device("cpu"),
        pp_rank=0,
        tp_rank=0,
        dp_rank=0,
        data_rank=0,
        is_reporting_rank=True,
        is_last_stage=True,
    ),
)
OF_THE_MODEL = ("model", "megatron", "rl", "metrics.py", "plan", "hugging_face")
"""Folders whose parts are built in ranks: the tests of ranks compare what their options make of numbers."""


class SmallPolicy:
    """One tensor."""

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec("t", (10,), "float32")]


@dataclass(frozen=True)
class Parts:
    """All parts of rank 0 but its policy."""

    job: Job
    folder: Path
    build: TrainerBuild
    buffer: Any
    rollout: Any
    schedule: Any
    ranks: Any
    console: Any
    exports: Any
    failure_budget: Any
    recorder: Any
    sender: Any
    samples: Any
    trackers: Any

    @property
    def publisher(self) -> Any:
        return self.ranks.engines

    @property
    def evaluations(self) -> Any:
        return self.console._evaluations

    @property
    def dataset(self) -> Any:
        return self.evaluations._evaluate._datasets[0]


ALL: Readers = {
    "buffer_address": [lambda p: p.buffer._peer.removeprefix("the buffer at ")],
    "rollout_address": [lambda p: ",".join(service.address for service in p.rollout.services)],
    "start_timeout_seconds": [
        lambda p: p.publisher._presence._away_seconds - PEER_WAIT_SECONDS,
    ],
    "num_rollout": [lambda p: p.schedule.num_steps, lambda p: p.ranks._num_steps, lambda p: p.console.status.num_steps],
    "rollout_batch_size": [lambda p: p.console.status.groups_per_step],
    "update_weights_interval": [lambda p: p.schedule._publish_every],
    "save_interval": [lambda p: p.schedule._save_every],
    "eval_interval": [lambda p: p.schedule._eval_every["sums"]],
    "skip_eval_before_train": [lambda p: not p.schedule._evaluates_first],
    "save": [lambda p: p.ranks._checkpoints._folder, lambda p: p.exports._reserved[0]],
    "load": [lambda p: p.ranks._checkpoints._config.load],
    "async_save": [lambda p: p.ranks._checkpoints._config.async_save],
    "keep_last": [lambda p: p.ranks._checkpoints._config.keep_last],
    "keep_best": [lambda p: p.ranks._checkpoints._config.keep_best],
    "keep_best_metric": [lambda p: p.ranks._checkpoints._config.keep_best_metric],
    "save_hf": [lambda p: p.ranks._save_hf],
    "export_root": [lambda p: p.exports._root],
    "max_failed_share": [lambda p: p.failure_budget._max_failed_share],
    "save_debug_rollout_data": [lambda p: p.recorder._recorded.pattern],
    "sample_log_bytes": [lambda p: p.samples._max_bytes, lambda p: p.evaluations._evaluate._samples.args[1]],
    "run_name": [lambda p: p.console.status.run, lambda p: p.trackers["run_name"]],
    "use_tensorboard": [lambda p: p.trackers["config"].use_tensorboard],
    "use_wandb": [lambda p: p.trackers["config"].use_wandb],
    "update_weight_timeout_seconds": [
        lambda p: p.publisher._seconds,
        lambda p: p.publisher._transport._seconds,
        lambda p: p.sender._timeout_seconds,
    ],
    "update_weight_pause_mode": [lambda p: p.publisher._config.update_weight_pause_mode],
    "update_weight_probe_tolerance": [lambda p: p.publisher._config.update_weight_probe_tolerance],
    "update_weight_rollback": [lambda p: "host" if p.publisher._transport._keeps else "none"],
    "rollout_num_gpus_per_engine": [lambda p: p.build.knows_checksums(ON_A_GPU) or 2],
    "eval_prompt_data": [lambda p: ((p.dataset.name, Path(p.dataset.path)),)],
    "eval_config": [lambda p: Path(p.evaluations._evaluate._datasets[1].path).parent / "eval.toml"],
    "rollout_timeout_seconds": [lambda p: p.evaluations._evaluate._seconds],
    "eval_exact_version": [lambda p: p.evaluations._exact],
    "custom_eval_rollout_log_function_path": [lambda p: p.evaluations._evaluate._users_log._hook.path],
    "n_samples_per_eval_prompt": [lambda p: p.dataset.n_samples_per_prompt],
    "eval_temperature": [lambda p: p.dataset.sampling.temperature],
    "eval_top_p": [lambda p: p.dataset.sampling.top_p],
    "eval_top_k": [lambda p: p.dataset.sampling.top_k],
    "eval_max_response_len": [lambda p: p.dataset.sampling.max_new_tokens],
    "eval_min_new_tokens": [lambda p: p.dataset.sampling.min_new_tokens],
    "rollout_stop": [lambda p: tuple(p.dataset.sampling.stop)],
    "rollout_stop_token_ids": [lambda p: tuple(p.dataset.sampling.stop_token_ids)],
    "eval_max_prompt_len": [lambda p: p.dataset.max_prompt_tokens],
    "eval_max_context_len": [lambda p: p.dataset.max_context_tokens],
    "eval_input_key": [lambda p: p.dataset.input_key],
    "eval_label_key": [lambda p: p.dataset.label_key],
    "eval_tool_key": [lambda p: p.dataset.tool_key],
    "metadata_key": [lambda p: p.dataset.metadata_key],
    "multimodal_keys": [lambda p: {"image": p.dataset.image_key}],
    "eval_reward_key": [lambda p: p.dataset.reward_key],
}
"""Of a run whose weights go to the engines in a collective group."""
AS_TRAINED: Readers = {
    "rollout_temperature": [lambda p: p.dataset.sampling.temperature],
    "rollout_max_response_len": [lambda p: p.dataset.sampling.max_new_tokens],
    "rollout_max_context_len": [lambda p: p.dataset.max_context_tokens],
    "input_key": [lambda p: p.dataset.input_key],
    "label_key": [lambda p: p.dataset.label_key],
    "tool_key": [lambda p: p.dataset.tool_key],
    "n_samples_per_prompt": [lambda p: p.failure_budget._recent._size / p.job.rollout.rollout_batch_size],
    "rollout_batch_size": [lambda p: p.failure_budget._recent._size / p.job.rollout.n_samples_per_prompt],
    "update_weight_transport": [lambda p: "disk" if p.publisher._transport._written else "another"],
    "update_weight_disk_path": [
        lambda p: p.sender._root,
        lambda p: p.publisher._transport._root,
        lambda p: p.exports._reserved[-1],
    ],
    "update_weight_buffer_size": [lambda p: p.sender._file_bytes],
    "update_weight_timeout_seconds": [lambda p: p.publisher._transport._seconds],
}
"""Of a run through files, whose evaluations have no options of their own."""
COLOCATED: Readers = {
    "colocate": [lambda p: p.evaluations._exact, lambda p: not p.sender._says_later],
    "offload_train": [lambda p: p.ranks.devices._to_host is not None],
    "offload_rollout": [lambda p: bool(p.ranks.devices._engines)],
    "update_weight_transport": [
        lambda p: "ipc" if p.publisher._transport._in_memory and p.sender._memory else "another"
    ],
    "update_weight_timeout_seconds": [lambda p: p.ranks.devices._to_host.args[0]],
}
ALONE: Readers = {
    "load_debug_rollout_data": [lambda p: p.buffer._recorded.pattern],
    "debug_rollout_only": [lambda p: not p.build.trains],
}
SHOWN_BY = {
    "engine_groups": "whether senders know checksums: tests/unit/trainer/control/test_publication_flags.py",
    "hf_checkpoint": "whether its weights are quantized: tests/unit/trainer/test_to_fp8.py",
    "loss_mask_type": "whether there are engines: tests/unit/rollout/test_without_engines.py",
    "eval_function_path": "whether there are engines: tests/unit/rollout/test_without_engines.py",
    "openai_port": "whether there are engines: tests/unit/rollout/test_without_engines.py",
    "rollout_external_engine_addrs": "the host that far engines reach: tests/e2e/test_whole_runs.py",
    "rollout_placement": "the host that far engines reach: tests/unit/rollout/engine/test_ray_engines.py",
    "run_dir": "the folder of the program's --run-dir: tests/unit/launch/test_spec.py",
    "wandb_project": "tests/unit/trainer/serving/test_trackers.py",
    "wandb_group": "tests/unit/trainer/serving/test_trackers.py",
    "wandb_team": "tests/unit/trainer/serving/test_trackers.py",
    "wandb_mode": "tests/unit/trainer/serving/test_trackers.py",
}
"""Options that the trainer reads and no table compares, with the test that shows them."""
ON_A_GPU = cast(Layout, SimpleNamespace(device=torch.device("cuda")))


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "model": {"hf_checkpoint": folder / "model"},
        "run": {"run_name": "unusual"},
        "data": {
            "input_key": "question",
            "label_key": "answer",
            "tool_key": "tools",
            "metadata_key": "facts",
            "multimodal_keys": {"image": "pictures"},
        },
        "rollout": {
            "num_rollout": 23,
            "rollout_batch_size": 12,
            "n_samples_per_prompt": 5,
            "rollout_temperature": 0.625,
            "rollout_max_response_len": 251,
            "rollout_timeout_seconds": 409.0,
            "rollout_max_context_len": 397,
            "rollout_stop": ["</end>"],
            "rollout_stop_token_ids": [11, 13],
            "max_failed_share": 0.375,
        },
        "hooks": {"custom_eval_rollout_log_function_path": f"{folder / 'hooks.py'}:log"},
        "eval": {
            "eval_prompt_data": [("sums", folder / "sums.jsonl")],
            "eval_config": folder / "eval.toml",
            "eval_interval": 7,
            "n_samples_per_eval_prompt": 3,
            "eval_temperature": 0.25,
            "eval_top_p": 0.875,
            "eval_top_k": 37,
            "skip_eval_before_train": True,
            "eval_max_response_len": 101,
            "eval_min_new_tokens": 9,
            "eval_max_prompt_len": 71,
            "eval_max_context_len": 199,
            "eval_input_key": "eval_question",
            "eval_label_key": "eval_answer",
            "eval_tool_key": "eval_tools",
            "eval_reward_key": "correct",
            "eval_exact_version": True,
        },
        "publish": {
            "update_weight_pause_mode": "retract",
            "update_weight_timeout_seconds": 97.0,
            "update_weight_probe_tolerance": 0.0625,
            "update_weight_rollback": "host",
            "update_weights_interval": 3,
        },
        "checkpoint": {
            "save": folder / "saved",
            "load": folder / "loaded",
            "save_interval": 5,
            "async_save": True,
            "keep_last": 4,
            "keep_best": 2,
            "keep_best_metric": "eval/sums",
            "save_hf": folder / "exported",
            "export_root": folder / "exports",
        },
        "debug": {"save_debug_rollout_data": f"{folder}/{{rollout_id}}.samples"},
        "services": {
            "buffer_address": "127.0.0.1:7001",
            "rollout_address": "127.0.0.1:7002,127.0.0.1:7003",
            "start_timeout_seconds": 811.0,
        },
        "placement": {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2},
        "tracking": {"sample_log_bytes": 123_456, "use_tensorboard": False, "use_wandb": True},
    }


VARIANTS: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], Readers]] = {
    "a collective group": ({}, ALL),
    "files": (
        {
            "eval": {"n_samples_per_eval_prompt": 3}
            | dict.fromkeys(
                (
                    *("eval_temperature", "eval_max_response_len", "eval_max_context_len"),
                    *("eval_input_key", "eval_label_key", "eval_tool_key"),
                )
            ),
            "publish": {
                "update_weight_transport": "disk",
                "update_weight_disk_path": Path("/shared/weights"),
                "update_weight_buffer_size": 4_321,
            },
        },
        AS_TRAINED,
    ),
    "shared devices": (
        {
            "eval": {"eval_exact_version": False},
            "placement": {"colocate": True, "offload_train": True, "offload_rollout": True},
            "publish": {"update_weight_transport": "ipc"},
        },
        COLOCATED,
    ),
    "a recorded run": (
        {"debug": {"load_debug_rollout_data": "recorded/{rollout_id}.samples", "debug_rollout_only": True}},
        ALONE,
    ),
}
"""Options that exclude each other are in different jobs."""


def job_of(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> Job:
    of_all = sections(folder)
    return Job.model_validate(of_all | {name: of_all.get(name, {}) | dict(of_one) for name, of_one in changes.items()})


@asynccontextmanager
async def parts_of(folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parts]:
    """As `run_rank0` builds them."""
    tracked: dict[str, Any] = {}

    def trackers(config: object, run_name: str, job: object, folder: Path) -> Any:
        tracked.update(config=config, run_name=run_name)
        return lambda step: []

    monkeypatch.setattr(build, "trackers", trackers)
    of_job, policy = TrainerBuild(job, folder / "run"), cast(Any, SmallPolicy())
    buffer, rollout = of_job.buffer(), of_job.rollout()
    is_recorded = job.debug.trains_alone
    schedule = None if is_recorded else of_job.schedule()
    report = of_job.report()
    console = None if schedule is None else of_job.console(report, rollout, schedule)
    channel = Channel(0, 1, b"")
    group = RankGroup(channel, cast(Any, None), ThreadPoolExecutor(1))
    checkpoints = Checkpoints(job.checkpoint, folder / "run", LAYOUT)
    ranks = of_job.ranks(group, Built(LAYOUT, cast(Any, None), checkpoints, 0), rollout, cast(Any, console))
    yield Parts(
        *(job, folder, of_job, buffer, rollout, schedule, ranks, console, of_job.exports(), of_job.failure_budget()),
        recorder=of_job.recorder(buffer, "train"),
        sender=of_job.sender(policy, LAYOUT, lambda _: False),
        samples=of_job._trained_samples(LAYOUT),
        trackers=tracked,
    )
    await channel.close()
    await buffer.close()
    if rollout is not None:
        await rollout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "hooks.py").write_text("def log(rollout_id, args, data, extra_metrics): return False\n")
    (tmp_path / "eval.toml").write_text('[[datasets]]\nname = "two"\npath = "two.jsonl"\n')
    return tmp_path


async def test_the_parts_have_the_values_that_the_job_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(services.trainer.__path__[0])
    files = [path for path in source.rglob("*.py") if path.relative_to(source).parts[0] not in OF_THE_MODEL]
    read = options_named_in([path for path in files if path.name not in ("check.py", "export_checkpoint.py")])
    compared = set[str]()
    for name, (changes, readers) in VARIANTS.items():
        job = job_of(folder, changes)
        with options_read() as now:
            async with parts_of(folder, job, monkeypatch) as parts:
                lines = ignored(job, parts, readers)
        assert not lines, f"{name}:\n" + "\n".join(lines)
        compared |= set(readers)
        read |= now
    assert sorted(read - compared - set(SHOWN_BY)) == [], "compare them above"
