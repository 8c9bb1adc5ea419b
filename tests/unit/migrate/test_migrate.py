"""What becomes of the settings of other projects' jobs. The inputs have the form of their published examples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.job.engine_shape import engine_shapes
from headrace.job.load.load import load, read
from headrace.job.rules.scope import scope_of_check
from headrace.job.schema.job import Job
from headrace.migrate import prime_rl, slime, trl, verl
from headrace.migrate.table import Migration, State
from tests.unit.migrate import prime_rl_examples, slime_examples, trl_examples, verl_examples

SLIME = slime_examples.SCRIPTS["qwen3-4B"]
VERL = verl_examples.SCRIPTS["grpo_trainer/run_qwen2-7b"]
PRIME_RL = prime_rl_examples.SCRIPTS["reverse-text/earlier.toml"]
GSPO, *GSPO_FLAGS = trl_examples.SCRIPTS["gspo.py"]
TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
dataset = load_dataset("trl-lib/tldr", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

raise SystemExit("a migration runs nothing")
training_args = GRPOConfig(
    output_dir="Qwen2.5-0.5B-GRPO", learning_rate=1e-5, beta=0.04, num_generations=8, per_device_train_batch_size=8,
    gradient_accumulation_steps=4, max_completion_length=64, temperature=0.9, max_steps=100, seed=len(MODEL),
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=reward_len, args=training_args, train_dataset=dataset)
trainer.train()
"""

SOURCES: dict[str, tuple[Callable[..., Migration], str, str]] = {
    "slime": (slime.migrate, "run.sh", SLIME),
    "verl": (verl.migrate, "run.sh", VERL),
    "verl.yaml": (verl.migrate, "ppo.yaml", ""),
    "trl": (trl.migrate, "train.py", TRL),
    "trl.sh": (trl.migrate, "run.sh", "trl grpo --model_name_or_path Q --dataset_name D"),
    "prime-rl": (prime_rl.migrate, "rl.toml", PRIME_RL),
}


def migrated(tmp_path: Path, project: str, text: str | None = None, flags: Sequence[str] = ()) -> Migration:
    migrate, name, own = SOURCES[project]
    (tmp_path / name).write_text(own if text is None else text)
    return migrate(tmp_path / name, {"HOME": "/home/me"}, flags)


def job_of(migration: Migration) -> Job:
    return read(None, migration.words, {})


def settled(tmp_path: Path, project: str, text: str | None = None, flags: Sequence[str] = ()) -> Job:
    """The job of the written file, as `headrace check --elsewhere` reads it."""
    migration = migrated(tmp_path, project, text, flags)
    assert migration.settle() is None
    return written(tmp_path, migration.toml())


def written(tmp_path: Path, text: str) -> Job:
    (tmp_path / "job.toml").write_text(text)
    return load(tmp_path / "job.toml", (), {}, lambda job: scope_of_check(job, elsewhere=True))


def sources(migration: Migration, state: State) -> list[str]:
    return [moved.source for moved in migration.of(state)]


def note(migration: Migration, source: str) -> str:
    return next(moved.note for moved in migration.moved if moved.source.startswith(source))


EXAMPLES = [
    *(("slime", name, text, ()) for name, text in slime_examples.SCRIPTS.items()),
    *(("verl", name, text, ()) for name, text in verl_examples.SCRIPTS.items()),
    *(("prime-rl", name, text, ()) for name, text in prime_rl_examples.SCRIPTS.items()),
    *(
        ("trl" if name.endswith(".py") else "trl.sh", name, text, flags)
        for name, (text, *flags) in trl_examples.SCRIPTS.items()
    ),
]


@pytest.mark.parametrize(("project", "name", "text", "flags"), EXAMPLES, ids=[f"{e[0]}-{e[1]}" for e in EXAMPLES])
def test_an_example_becomes_a_job_that_check_takes(tmp_path, project, name, text, flags):
    job = settled(tmp_path, project, text, flags)
    assert job.model.hf_checkpoint.name


def test_every_flag_of_a_script_of_slime_is_listed(tmp_path):
    text = slime_examples.SCRIPTS["deepseek-r1"]
    listed = {moved.source.split()[0] for moved in migrated(tmp_path, "slime", text).moved}
    given = {line.split()[0] for line in text.splitlines() if line.strip().startswith("--")}
    assert given - listed - {'--runtime-env-json="${RUNTIME_ENV_JSON}"', "--"} == set()


def test_a_script_of_slime_keeps_its_flags(tmp_path):
    migration = migrated(tmp_path, "slime")
    job = job_of(migration)
    assert (job.rollout.rollout_batch_size, job.train.eps_clip_high, job.megatron["lr"]) == (32, 0.28, 1e-6)
    assert (str(job.model.hf_checkpoint), job.placement.colocate) == ("/mnt/slime/M", True)
    assert sources(migration, "changed") == ["source models/MODEL.sh"]
    assert sources(migration, "no counterpart") == [], "a line that is a comment is none"


def test_slimes_asynchronous_script_is_a_staleness_of_one(tmp_path):
    assert settled(tmp_path, "slime", slime_examples.SCRIPTS["fully_async-qwen3-4b"]).buffer.max_staleness == 1


def test_slimes_supervised_script_trains_conversations_without_engines(tmp_path):
    job = settled(tmp_path, "slime", slime_examples.SCRIPTS["qwen3-4B-base-sft"])
    assert (job.train.loss_type, job.train.loss_mask_type, job.rollout.n_samples_per_prompt) == ("sft_loss", "qwen", 1)
    assert not job.debug.debug_train_only


def test_what_slime_does_without_a_flag_is_done_here(tmp_path):
    text = SLIME.replace("--input-key prompt", "").replace("--kl-loss-type low_var_kl", "")
    job = settled(tmp_path, "slime", text.replace("--lr-decay-style constant", ""))
    assert (job.data.input_key, job.train.kl_loss_type, job.megatron["lr_decay_style"]) == ("input", "k1", "linear")


def test_a_branch_that_the_script_decides_is_taken(tmp_path):
    job = settled(tmp_path, "slime", slime_examples.SCRIPTS["geo3k_vlm"])
    assert job.megatron["tensor_model_parallel_size"] == 4
    assert job.data.multimodal_keys == {"image": "images"}


def test_a_branch_that_only_a_run_can_choose_is_reported(tmp_path):
    text = SLIME.replace("GROUP1_ARGS=(", "if nvidia-smi; then GROUP0_ARGS+=( --use-tis ); fi\nGROUP1_ARGS=(")
    migration = migrated(tmp_path, "slime", text)
    assert note(migration, "--use-tis") == "the script decides this when it runs: set it yourself"
    assert not job_of(migration).train.use_tis


def test_a_value_that_the_script_computes_is_not_guessed(tmp_path):
    migration = migrated(tmp_path, "slime", SLIME.replace("dapo-math", "$(basename $SET)/math"))
    assert job_of(migration).data.prompt_data == ("/mnt/slime/COMPUTED/math-17k.jsonl",)
    assert "replace COMPUTED" in note(migration, "--prompt-data")


def test_a_variable_that_nobody_sets_stays_by_its_name(tmp_path):
    migration = migrated(tmp_path, "slime", slime_examples.SCRIPTS["glm4.5-355B-A32B"])
    assert str(job_of(migration).model.hf_checkpoint) == "BASE_DIR/M"
    assert note(migration, "--hf-checkpoint") == "set BASE_DIR before `headrace migrate`, or replace it"


def test_the_environment_sets_what_the_script_does_not(tmp_path):
    (tmp_path / "run.sh").write_text(slime_examples.SCRIPTS["glm4.5-355B-A32B"])
    migration = slime.migrate(tmp_path / "run.sh", {"BASE_DIR": "/data"})
    assert str(job_of(migration).model.hf_checkpoint) == "/data/M"


def test_several_machines_ask_for_their_addresses(tmp_path):
    job = settled(tmp_path, "slime", slime_examples.SCRIPTS["minimax-m2"])
    assert job.placement.actor_num_nodes == 4
    assert job.services.rollout_address == "HOST-0:7002,HOST-1:7002,HOST-2:7002,HOST-3:7002"
    assert job.placement.rollout_num_gpus_per_engine == 8, "16 in the script, and it takes turns with ranks"


def test_an_engine_that_has_gpus_of_its_own_keeps_its_machines(tmp_path):
    script = slime_examples.SCRIPTS["minimax-m2"]
    job = settled(tmp_path, "slime", script.replace("--colocate", ""))
    assert job.placement.rollout_placement == "ray"
    assert [(shape.devices, shape.nodes) for shape in engine_shapes(job)] == [(16, 2)]


def test_a_setting_that_a_rule_refuses_is_listed_with_the_rule(tmp_path):
    migration = migrated(tmp_path, "slime", SLIME.replace("--use-kl-loss", "--use-tensorboard"))
    assert migration.settle() is None
    assert "no effect without use_kl_loss" in note(migration, "--ref-load /mnt")


def test_a_line_without_its_backslash_is_taken_and_reported(tmp_path):
    text = SLIME.replace("--colocate \\\n", "--colocate\n").replace("${MODEL_ARGS[@]}", "")
    migration = migrated(tmp_path, "slime", text)
    assert job_of(migration).rollout.num_rollout == 3000
    assert "backslash" in note(migration, "--hf-checkpoint …")


def test_a_script_of_verl_counts_its_mini_batches_as_steps(tmp_path):
    migration = migrated(tmp_path, "verl")
    job = job_of(migration)
    assert (job.rollout.rollout_batch_size, job.train.num_steps_per_rollout) == (1024, 4)
    assert (job.rollout.n_samples_per_prompt, job.checkpoint.save_interval) == (5, 20)
    assert job.data.prompt_data[0] == "/home/me/data/gsm8k/train.parquet"
    assert job.train.calculate_per_token_loss, "verl's default"
    assert "actor_rollout_ref.actor.fsdp_config.param_offload=False" in sources(migration, "no counterpart")


def test_sums_and_megatrons_fields_of_verl_are_carried(tmp_path):
    job = settled(tmp_path, "verl", verl_examples.SCRIPTS["grpo_trainer/run_qwen3moe-30b_megatron_96gb"])
    assert (job.rollout.rollout_max_response_len, job.train.max_tokens_per_gpu) == (8192, 10240)
    assert (job.megatron["moe_router_dtype"], job.megatron["apply_rope_fusion"]) == ("fp32", False)


def test_a_yaml_of_verl_is_read_as_its_overrides_are(tmp_path):
    text = (
        "data: {train_files: [a.parquet, b.parquet], train_batch_size: 64}\n"
        "actor_rollout_ref: {model: {path: /m/Q}, rollout: {n: 4}, actor: {optim: {lr: 1e-6}}}\n"
        "algorithm: {adv_estimator: grpo}\n"
    )
    job = job_of(migrated(tmp_path, "verl.yaml", text, ["actor_rollout_ref.rollout.n=8", "~trainer.x"]))
    assert (job.rollout.n_samples_per_prompt, job.data.prompt_data) == (8, ("a.parquet", "b.parquet"))


def test_a_value_without_counterpart_is_listed_and_others_become_their_words(tmp_path):
    flags = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.loss_agg_mode=odd", "trainer.save_freq=-1"]
    migration = migrated(tmp_path, "verl", flags=flags)
    assert job_of(migration).train.advantage_estimator == "ppo"
    assert job_of(migration).checkpoint.save_interval is None, "-1 means never"
    assert "actor_rollout_ref.actor.loss_agg_mode=odd" in sources(migration, "no counterpart")


def test_a_script_of_trl_is_read_and_not_run(tmp_path):
    migration = migrated(tmp_path, "trl")
    job = job_of(migration)
    assert str(job.model.hf_checkpoint) == "Qwen/Qwen2.5-0.5B-Instruct"
    assert job.rollout.rollout_batch_size == 4, "8 samples x 4 steps are 4 prompts of 8 samples"
    assert (job.train.kl_loss_coef, job.rollout.num_rollout) == (0.04, 100)
    assert job.reward.custom_rm_path == f"{tmp_path}/train.py:reward_len"
    assert "importing this one trains" in note(migration, "reward_funcs: reward_len")
    assert "GRPOConfig(seed=…)" in sources(migration, "no counterpart"), "it is computed"


def test_flags_of_a_script_of_trl_come_behind_it(tmp_path):
    job = settled(tmp_path, "trl", GSPO, GSPO_FLAGS)
    assert job.model.hf_checkpoint.match("Qwen/Qwen3-0.6B")
    assert (job.train.advantage_estimator, job.lora.lora_rank) == ("gspo", 16)


def test_a_script_of_trl_without_its_flags_says_what_is_missing(tmp_path):
    migration = migrated(tmp_path, "trl", GSPO)
    assert "--model_name_or_path" in note(migration, "model")
    assert "hf_checkpoint" in (migration.settle() or "")


def test_bash_that_starts_a_script_of_trl_is_read_with_it(tmp_path):
    (tmp_path / "gspo.py").write_text(GSPO)
    launch = f"accelerate launch --config_file z.yaml examples/scripts/gspo.py {' '.join(GSPO_FLAGS)}"
    migration = migrated(tmp_path, "trl.sh", launch)
    assert "reward_funcs: think_format_reward" in sources(migration, "no counterpart")
    assert str(job_of(migration).model.hf_checkpoint) == "Qwen/Qwen3-0.6B"


def test_prime_rls_batch_is_counted_in_prompts(tmp_path):
    migration = migrated(tmp_path, "prime-rl")
    job = job_of(migration)
    assert (job.rollout.rollout_batch_size, job.rollout.n_samples_per_prompt) == (8, 16)
    assert sources(migration, "no counterpart") == ["orchestrator.env = [{'id': 'reverse-text'}]"]


@pytest.mark.parametrize("project", SOURCES)
def test_another_file_is_refused(tmp_path, project):
    with pytest.raises(InvalidArgument):
        migrated(tmp_path, project, "print(1)\n")


@pytest.mark.parametrize(("project", "module"), [("slime", "tree_sitter"), ("verl.yaml", "yaml")])
def test_a_missing_parser_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch, project, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FailedPrecondition, match=r"headrace\[migrate\]"):
        migrated(tmp_path, project)


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "\u2028"])
def test_what_a_source_says_cannot_leave_its_comment(tmp_path, text):
    migration = migrated(tmp_path, "verl", VERL.replace("trainer.critic_warmup=0", f"trainer.odd='{text}'"))
    assert written(tmp_path, migration.toml("refused\nfor a test"))


@pytest.mark.parametrize(
    ("project", "text", "flags"),
    [
        ("slime", SLIME, ["--wandb-key", "my-key"]),
        ("verl", VERL, ["trainer.api_key=my-key"]),
        ("prime-rl", PRIME_RL.replace('id = "reverse-text"', 'args = { api_key = "my-key" }'), ()),
        ("trl", TRL.replace("learning_rate=1e-5", "hub_token='my-key'"), ["--hub_token", "my-key"]),
    ],
)
def test_a_key_is_written_nowhere(tmp_path, project, text, flags):
    migration = migrated(tmp_path, project, text, flags)
    assert migration.settle() is None
    assert "my-key" not in migration.toml()
    assert "…" in migration.toml()


def test_the_command_writes_a_job_and_lists_each_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SLIME)
    assert main(["migrate", "slime", "run.sh", "--", "--wandb-key", "k", "--odd", "[/x]"]) == 0
    assert "no counterpart  --odd [/x]" in capsys.readouterr().out
    assert "WANDB_API_KEY" in Path("job.toml").read_text(), "what is missing stands above the job"
    assert main(["migrate", "slime", "run.sh"]) != 0, "a file that is there is kept"


def test_a_job_that_is_refused_is_written_with_the_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        SLIME.replace("--rollout-batch-size 32", "").replace("--global-batch-size 256", "--num-steps-per-rollout 1")
    )
    assert main(["migrate", "slime", "run.sh"]) == 1
    assert "refuses it" in Path("job.toml").read_text()
    capsys.readouterr()
    assert main(["migrate", "slime", "run.sh", "--json", "--", "--rollout-batch-size", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] is None
