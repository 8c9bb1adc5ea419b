"""Where a job's values come from, and that what is written down can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.load.load import load
from headrace.job.schema.job import to_toml


def test_flags_override_variables_and_variables_override_the_file(load_with) -> None:
    assert load_with().rollout.rollout_batch_size == 4
    assert load_with(HEADRACE_ROLLOUT_BATCH_SIZE="6").rollout.rollout_batch_size == 6
    job = load_with("--rollout-batch-size", "8", HEADRACE_ROLLOUT_BATCH_SIZE="6")
    assert job.rollout.rollout_batch_size == 8


def test_switches_can_be_turned_on_and_off(load_with) -> None:
    assert load_with("--use-tis").train.use_tis
    assert not load_with("--no-use-tis", HEADRACE_USE_TIS="true").train.use_tis
    assert not load_with("--use-tensorboard=false").tracking.use_tensorboard


def test_many_values_come_together_or_one_by_one_and_replace_the_files(load_with) -> None:
    job = load_with("--rollout-stop", "x", "y", "--rollout-stop", "z", "--rollout-stop-token-ids", "1", "2")
    assert job.rollout.rollout_stop == ("x", "y", "z")
    assert job.rollout.rollout_stop_token_ids == (1, 2)
    assert load_with().rollout.rollout_stop == ("a", "b")


def test_evaluation_data_comes_as_pairs(load_with, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text('{"prompt": "hello"}\n')
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    job = load_with("--eval-prompt-data", "a", one, "--eval-prompt-data", "b", two)
    assert job.eval.eval_prompt_data == (("a", Path(one)), ("b", Path(two)))


def test_the_chat_templates_variables_come_as_an_object(load_with, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "thoughtless.toml"
    file.write_text(
        f'model.hf_checkpoint = "{model}"\n[data]\napply_chat_template_kwargs = {{enable_thinking = false}}\n'
    )
    text = '{"enable_thinking": false}'
    for job in (
        load_with("--apply-chat-template-kwargs", text),
        load_with(HEADRACE_APPLY_CHAT_TEMPLATE_KWARGS=text),
        load(file, ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2"], {}),
    ):
        assert job.data.apply_chat_template_kwargs == {"enable_thinking": False}
        written = tmp_path / "written.toml"
        written.write_text(to_toml(job))
        assert load(written, [], {}) == job
    with pytest.raises(ConfigError, match="--apply-chat-template-kwargs"):
        load_with("--apply-chat-template-kwargs", "enable_thinking=false")


def test_any_field_of_megatrons_configs_is_a_flag_with_its_type(load_with) -> None:
    job = load_with(
        "--recompute-modules", "core_attn", "mlp", "--moe-aux-loss-coeff", "[0.1, 0.2]", "--attention-backend", "local",
        "--muon-momentum", "0.8", "--bucket-size", "1000", "--no-check-for-nan-in-grad", "--max-lr", "3e-5",
        "--decoder-first-pipeline-num-layers", "1",
    )  # fmt: skip
    assert job.megatron == {
        "recompute_modules": ("core_attn", "mlp"),
        "moe_aux_loss_coeff": (0.1, 0.2),
        "attention_backend": "local",
        "muon_momentum": 0.8,
        "bucket_size": 1000,
        "check_for_nan_in_grad": False,
        "lr": 3e-5,
        "num_layers_in_first_pipeline_stage": 1,
    }


def test_paths_become_absolute(load_with, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "reward.py").write_text("async def judge(args, sample): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    job = load_with("--prompt-data", "data.jsonl", "--custom-rm-path", "reward.py:judge")
    assert job.data.prompt_data == (str(tmp_path / "data.jsonl"),)
    assert job.reward.custom_rm_path == f"{tmp_path}/reward.py:judge"


def test_the_resolved_job_reads_back_from_toml_and_from_json(load_with, tmp_path: Path) -> None:
    job = load_with("--rollout-stop", 'a "quoted" one', "--sglang-log-level", "error", "--rollout-top-p", "0.9")
    (tmp_path / "back.toml").write_text(to_toml(job))
    (tmp_path / "back.json").write_text(job.model_dump_json())
    assert load(tmp_path / "back.toml", [], {}) == job
    assert load(tmp_path / "back.json", [], {}) == job


@pytest.mark.parametrize(
    ("left_out", "derived"),
    [
        ("rollout_batch_size", 4),
        ("n_samples_per_prompt", 8),
        ("global_batch_size", 16),
        ("num_steps_per_rollout", 2),
    ],
)
def test_one_of_the_four_batch_sizes_is_derived(model: Path, left_out: str, derived: int) -> None:
    four = {"rollout-batch-size": 4, "n-samples-per-prompt": 8, "global-batch-size": 16, "num-steps-per-rollout": 2}
    flags = [
        word for name, value in four.items() if name != left_out.replace("_", "-") for word in (f"--{name}", str(value))
    ]
    job = load(None, ["--hf-checkpoint", str(model), *flags], {})
    found = job.rollout.model_dump() | job.train.model_dump()
    assert found[left_out] == derived
