"""Command lines written for slime: every flag of its own scripts is taken, mapped, or refused with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.load.flags import UNSUPPORTED
from headrace.job.load.load import load, read
from headrace.job.megatron import megatron
from headrace.job.model import contradictions
from headrace.job.option import options
from headrace.job.rules.rules import warnings
from headrace.models.registry import PRESETS, architecture
from tests.support.slime_flags import MODEL_ARGS, REFUSED, SAME_NAME, TAKEN


def read_line(line: str, notes: list[str] | None = None):
    heard = [] if notes is None else notes
    return read(None, ["--hf-checkpoint", "model", *line.split()], {}, heard.append)


@pytest.mark.parametrize("line", re.findall(r"--\S+(?: (?!--)\S+)?", SAME_NAME.replace("\n", " ")))
def test_a_flag_of_slimes_scripts_sets_the_option_of_its_name(line: str) -> None:
    flag, _, word = line.partition(" ")
    option = options()[flag[2:].replace("-", "_")]
    given = getattr(read_line(line), option.section)
    found = given[option.name] if isinstance(given, dict) else getattr(given, option.name)
    assert found == type(found)(word or True)


@pytest.mark.parametrize(("line", "option", "value"), TAKEN)
def test_a_flag_of_slimes_scripts_sets_its_option(line: str, option: str, value: object) -> None:
    section, name = option.split(".")
    given = getattr(read_line(line), section)
    assert (given[name] if isinstance(given, dict) else getattr(given, name)) == value


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_a_flag_that_is_not_taken_says_what_to_do_instead(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        read_line(line)
    assert line.split()[0].removeprefix("--").replace("-", "_") in refused.value.message.replace("-", "_")
    assert "did you mean" not in refused.value.message


@pytest.mark.parametrize("name", MODEL_ARGS)
def test_the_model_args_of_a_script_agree_with_its_checkpoint(name: str) -> None:
    given = megatron(read_line(MODEL_ARGS[name]).megatron)
    assert contradictions(architecture(PRESETS[name].config), given) == []


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("qwen3-4B", "--multi-latent-attention", "--multi-latent-attention True contradicts the checkpoint, whose"),
        ("deepseek-v3", "--no-multi-latent-attention", "--multi-latent-attention False contradicts the checkpoint"),
        ("qwen3-4B", "--no-group-query-attention", "--group-query-attention False contradicts the checkpoint"),
        ("qwen3-4B", "--no-use-rotary-position-embeddings", "--use-rotary-position-embeddings False contradicts"),
        ("qwen3-4B", "--use-rope-scaling", "--use-rope-scaling True contradicts the checkpoint"),
        ("qwen3-4B", "--rotary-interleaved", "--rotary-interleaved True contradicts the checkpoint"),
        ("qwen3-4B", "--post-self-attn-layernorm", "--post-self-attn-layernorm True contradicts the checkpoint"),
        ("glm-z1-9B", "--no-post-mlp-layernorm", "--post-mlp-layernorm False contradicts the checkpoint"),
        ("qwen3-4B", "--apply-layernorm-1p", "--layernorm-zero-centered-gamma True contradicts the checkpoint"),
        ("qwen3-4B", "--use-gated-attention", "--attention-output-gate True contradicts the checkpoint"),
        ("glm-4.5-Air", "--moe-layer-freq [0]*2+[1]*44", "--moe-layer-freq 0 0 1 1"),
        ("qwen3-30B-A3B", "--moe-layer-freq 2", "--moe-layer-freq 2 contradicts the checkpoint"),
        ("qwen3-4B", "--spec slime_plugins.models.glm4 get_glm_spec", "config.json says qwen3: leave the flag out"),
        ("qwen3-4B", "--no-swiglu", "--swiglu False contradicts the checkpoint"),
    ],
)
def test_model_args_of_another_model_are_refused(name: str, flags: str, message: str) -> None:
    (said,) = contradictions(architecture(PRESETS[name].config), megatron(read_line(flags).megatron))
    assert message in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 35),
        ("hidden_size", 2561),
        ("ffn_hidden_size", 9729),
        ("num_attention_heads", 16),
        ("num_query_groups", 4),
        ("kv_channels", 64),
        ("max_position_embeddings", 1),
        ("vocab_size", 151937),
        ("rotary_base", 5000000),
        ("rotary_percent", 0.5),
        ("norm_epsilon", 1e-5),
        ("normalization", "LayerNorm"),
        ("qk_layernorm", "false"),
        ("add_qkv_bias", "true"),
        ("swiglu", "false"),
        ("untie_embeddings_and_output_weights", "true"),
        ("no_position_embedding", "false"),
        ("disable_bias_linear", "false"),
        ("seq_length", 999999),
    ],
)
def test_an_architecture_flag_that_says_something_else_is_refused_by_name(name: str, value: object) -> None:
    flag = f"--{name.replace('_', '-')}"
    (said,) = contradictions(architecture(PRESETS["qwen3-4B"].config), megatron(read_line(f"{flag}={value}").megatron))
    assert said.startswith(flag)


@pytest.mark.parametrize(
    "line",
    [
        "--position-embedding-type learned_absolute",
        "--tokenizer-type Llama2Tokenizer",
        "--train-backend fsdp",
        "--update-weight-transport carrier-pigeon",
    ],
)
def test_a_choice_with_one_answer_refuses_another(line: str) -> None:
    with pytest.raises(ConfigError, match=f"{line.split()[0]}: should be"):
        read_line(line)


def test_all_unknown_flags_are_told_at_once_and_no_far_name_is_suggested() -> None:
    with pytest.raises(ConfigError) as refused:
        read_line("--no-load-rng --lr 1e-6 --my-own-flag 3 --rollout-bach-size 4 --log-samples-per-step --eps-clip")
    assert refused.value.message.splitlines() == [
        "5 flags are wrong:",
        f"  --no-load-rng is not a flag of headrace: {UNSUPPORTED['no_load_rng']}",
        "  unknown flag --my-own-flag",
        "  unknown flag --rollout-bach-size: did you mean --rollout-batch-size?",
        "  unknown flag --log-samples-per-step",
        "  --eps-clip takes one value, got none",
    ]


def test_of_a_flag_given_twice_the_last_one_counts_and_it_is_said_once() -> None:
    notes: list[str] = []
    job = read_line(
        "--rotary-base 10000 --lr 1e-6 --rotary-base 5000000 --max-staleness 1 --async-buffer-size 2", notes
    )
    assert job.megatron["rotary_base"] == 5000000
    assert job.buffer.max_staleness == 2
    assert notes == [
        "rotary_base is given twice, --rotary-base 10000 and --rotary-base 5000000: the last one counts",
        "max_staleness is given twice, --max-staleness 1 and --async-buffer-size 2: the last one counts",
    ]


def test_sequence_parallelism_without_tensor_ranks_is_off_and_said(load_with) -> None:
    job = load_with("--sequence-parallel")
    assert warnings(job) == ["sequence_parallel has no effect with tensor_model_parallel_size 1 and is turned off"]
    assert warnings(load_with()) == []


def test_a_folder_to_resume_from_that_is_not_there_yet_is_a_run_that_begins(load_with, tmp_path: Path) -> None:
    folder = tmp_path / "slime"
    job = load_with("--load", str(folder), "--save", str(folder))
    assert job.checkpoint.load == folder
    assert [f"load {folder} does not exist yet: training starts from the beginning"] == [
        sentence.partition(", with")[0] for sentence in warnings(job)
    ]
    folder.mkdir()
    assert warnings(load_with("--load", str(folder))) == []


def test_a_whole_line_of_slimes_starts(model: Path, tmp_path: Path) -> None:
    """scripts/run-qwen3-4B.sh, without two lines that name what is not here.

    They are the GPUs' sharing, and Megatron's own checkpoint of the reference.
    """
    (model / "config.json").write_text(json.dumps(PRESETS["qwen3-4B"].config))
    for name in ("train.jsonl", "aime.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    line = f"""
        --actor-num-nodes 1 --actor-num-gpus-per-node 8 {MODEL_ARGS["qwen3-4B"]} --hf-checkpoint {model}
        --load {tmp_path}/slime/ --save {tmp_path}/slime/ --save-interval 20
        --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
        --prompt-data {tmp_path}/train.jsonl --input-key prompt --label-key label --apply-chat-template
        --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
        --rollout-max-response-len 8192 --rollout-temperature 0.8 --global-batch-size 256 --balance-data
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
        --eps-clip 0.2 --eps-clip-high 0.28
        --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
        --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
        --eval-interval 20 --eval-prompt-data aime {tmp_path}/aime.jsonl --n-samples-per-eval-prompt 16
        --eval-max-response-len 16384 --eval-top-p 0.7
        --rollout-num-gpus-per-engine 2 --rollout-num-gpus 2 --sglang-mem-fraction-static 0.7
        --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
        --attention-backend flash
    """
    job = load(None, line.split(), {})
    assert job.train.num_steps_per_rollout == 1
    assert warnings(job) == [
        f"load {tmp_path}/slime does not exist yet: training starts from the beginning, with hf_checkpoint's weights"
    ]
