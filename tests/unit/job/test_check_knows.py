"""What `headrace check` refuses before anything starts, and what it leaves to the machine that will run the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.load.load import load
from headrace.job.rules import scope as scopes
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job

DOCUMENTS_REWARDS = """
from slime.data import Sample

async def reward_func(args, sample: Sample, **kwargs) -> float:
    return 1.0

async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
    return [await reward_func(args, sample) for sample in samples]
"""
DOCUMENTS_GENERATE = """
def extract_tool_call(response):
    return None

async def generate_single(conversation):
    return ""

def compute_reward(sample):
    return 1.0

async def custom_generate(args, samples, evaluation=False):
    return samples
"""
REWARD_CLASS = """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model = model_path

    def compute_reward(self, prompts, responses):
        return [1.0 for _ in prompts]
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 7 --actor-num-gpus-per-node 7", "7 does not divide vocab_size 320"),
        ("--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8", "8 does not divide num_attention_heads 4"),
        ("--sglang-mem-fraction-static 7", "--sglang-mem-fraction-static 7: should be a number above 0 and below 1"),
        ("--sglang-context-length many", "--sglang-context-length many: should be a number of 1 or more"),
        ("--sglang-port 30000", "--sglang-port cannot be given: a free port is chosen"),
        (
            "--sglang-tp-size 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4",
            "--sglang-tp-size 2 contradicts rollout_num_gpus_per_engine 4, which is the same",
        ),
        ("--sglang-tp-size 2", "rollout_num_gpus 1 cannot be divided by rollout_num_gpus_per_engine 2"),
        ("--rollout-max-response-len 4096", "rollout_max_response_len 4096 is not below 2048, the model's max_posit"),
        ("--sglang-context-length 512", "rollout_max_response_len 1024 is not below 512, --sglang-context-length"),
        (
            "--custom-rm-path slime.rollout.rm_hub.math_utils.grade",
            "is a module of slime, which headrace does not have: name a scorer with --rm-type",
        ),
        (
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "write headrace.hooks.filter.check_reward_nonzero_std",
        ),
        ("--run-dir /dev/null", "run_dir /dev/null/run cannot be written: Not a directory: choose another folder"),
        ("--save /dev/null/here", "save /dev/null/here cannot be written: Not a directory"),
    ],
)
def test_a_job_that_would_fail_after_a_minute_is_refused_at_once(load_with, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with(*flags.split())


def test_sglangs_own_name_of_an_engines_size_is_taken(load_with) -> None:
    job = load_with("--sglang-tp-size", "2", "--rollout-num-gpus", "4")
    assert job.placement.rollout_num_gpus_per_engine == 2
    assert "tp_size" not in job.sglang


@pytest.mark.parametrize(
    ("flag", "text", "more", "function"),
    [
        ("--custom-rm-path", DOCUMENTS_REWARDS, (), "reward_func"),
        ("--custom-rm-path", DOCUMENTS_REWARDS, ("--group-rm",), "batched_custom_rm"),
        ("--custom-rm-path", REWARD_CLASS, (), "CustomRewardModel"),
        ("--custom-rm-path", "def mine(a, s): return 1.0\n", (), "mine"),
        ("--custom-generate-function-path", DOCUMENTS_GENERATE, (), "custom_generate"),
        (
            "--custom-generate-function-path",
            "async def generate(args, sample, sampling_params): ...\nasync def reward_func(args, sample, **kw): ...\n",
            (),
            "generate",
        ),
    ],
)
def test_a_file_alone_means_its_only_function_that_fits(
    load_with, tmp_path: Path, flag: str, text: str, more: tuple[str, ...], function: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    job = load_with(flag, str(file), *more)
    assert f"{file}:{function}" in (job.reward.custom_rm_path, job.rollout.custom_generate_function_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def one(args, sample): ...\ndef two(args, sample): ...\n",
            r"one, two all fit: name one of them, as .*mine.py:one",
        ),
        ("def one(:\n", "mine.py, line 1: invalid syntax"),
    ],
)
def test_a_file_that_leaves_it_open_is_refused(load_with, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_with("--custom-rm-path", str(tmp_path / "mine.py"))


@pytest.mark.parametrize("service", ["buffer", "reward"])
def test_a_service_without_a_model_starts_where_there_is_no_model(
    job_file: Path, model: Path, tmp_path: Path, service: str
) -> None:
    for file in model.iterdir():
        file.unlink()
    model.rmdir()
    (tmp_path / "reward.py").write_text("def judge(args, sample): return 1.0\n")
    flags = ["--custom-rm-path", str(tmp_path / "reward.py"), "--recompute-activations", "--moe-permute-fusion"]
    with pytest.raises(ConfigError, match="is not a folder"):
        load(job_file, flags, {})
    assert load(job_file, flags, {}, lambda _: Scope([service])).reward.custom_rm_path


@pytest.mark.parametrize(
    ("service", "flags"),
    [
        ("buffer", ("--prompt-data", "/nowhere.jsonl", "--buffer-address", "127.0.0.1:7000")),
        ("reward", ("--custom-rm-path", "/nowhere.py:f", "--reward-address", "127.0.0.1:7000")),
        ("rollout", ("--eval-prompt-data", "a", "/nowhere.jsonl", "--rollout-address", "127.0.0.1:7000")),
    ],
)
def test_a_service_that_is_started_here_checks_its_own_files_at_its_address(
    job_file: Path, service: str, flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="/nowhere.* does not exist"):
        load(job_file, flags, {}, lambda _: Scope([service]))
    assert load(job_file, flags, {}).run.run_name  # they are another machine's


def test_a_job_for_gpus_elsewhere_is_checked_without_them(
    job_file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "num_gpus", lambda: 0)
    (model / "model.safetensors").rename(model / "elsewhere")
    seen: list[Scope] = []

    def scope_of(job: Job) -> Scope:
        seen.append(scopes.scope_of_check(job, elsewhere=False))
        return seen[-1]

    flags = ["--moe-permute-fusion", "--prompt-data", "/cluster/data/train.jsonl"]
    load(job_file, flags, {}, scope_of)
    assert seen[0].elsewhere == "--moe-permute-fusion"
    assert len(seen[0].unchecked) == 3
    with pytest.raises(ConfigError, match="prompt_data /nowhere.jsonl does not exist"):
        load(job_file, ["--moe-permute-fusion", "--prompt-data", "/nowhere.jsonl"], {}, scope_of)
    (model / "elsewhere").rename(model / "model.safetensors")
    with pytest.raises(ConfigError, match="moe-permute-fusion: Megatron-core does that only on a GPU"):
        load(job_file, flags[:1], {}, lambda _: Scope(["trainer"]))


@pytest.mark.parametrize(
    "flags",
    [
        ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "attn_proj"],
        ["--cpu-offloading", "--cpu-offloading-num-layers", "1"],
    ],
)
def test_activation_offload_is_taken_for_a_machine_with_gpus_and_refused_by_name_without(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(scopes, "num_gpus", lambda: 0)
    job = load(job_file, flags, {}, lambda job: scopes.scope_of_check(job, elsewhere=False))
    assert scopes.scope_of_check(job, elsewhere=False).elsewhere == flags[0]
    assert flags[0][2:].replace("-", "_") in job.megatron
    with pytest.raises(ConfigError, match=flags[0][2:]):
        load(job_file, flags, {}, lambda _: Scope(["trainer"]))


def test_a_kv_cache_in_fp8_is_checked_for_a_machine_with_gpus(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "num_gpus", lambda: 0)
    flags = ["--sglang-kv-cache-dtype", "fp8_e4m3"]
    job = load(job_file, flags, {}, lambda job: scopes.scope_of_check(job, elsewhere=False))
    assert job.sglang["kv_cache_dtype"] == "fp8_e4m3"
    assert scopes.scope_of_check(job, elsewhere=False).elsewhere == flags[0]
