"""Every mistake in a job is refused before anything starts, with a sentence that names the place and the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.load.load import load, read_environment, read_file
from headrace.job.option import options
from headrace.job.schema.job import CONSTANTS, Job, read_job
from headrace.launch.specs import address_in

ON_TWO = "--colocate --actor-num-nodes 2 --rollout-address 10.0.0.1:7002"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rollout-bach-size 4", "unknown flag --rollout-bach-size: did you mean --rollout-batch-size?"),
        ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size?"),
        (
            "--sglang-mem-fraction-statik 0.5",
            "SGLang has no argument mem_fraction_statik: did you mean mem_fraction_static?",
        ),
        ("--no-lr", "unknown flag --no-lr"),
        ("--eps-clip", "--eps-clip takes one value, got none"),
        ("--eps-clip 0.1 0.2", "--eps-clip takes one value, got 2: 0.1 0.2"),
        ("--eps-clip=-1", "--eps-clip: should be greater than 0, got '-1'"),
        ("--num-rollout many", "--num-rollout: should be a valid integer"),
        ("--advantage-estimator magic", "--advantage-estimator: should be 'grpo', 'gspo', .*, got 'magic'"),
        ("--eval-prompt-data gsm8k", "--eval-prompt-data takes NAME PATH pairs, got 1: gsm8k"),
        (
            "--global-batch-size 5",
            "= 32 samples, but global_batch_size 5 x num_steps_per_rollout 2 = 10 samples",
        ),
        (
            "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2",
            r"3 ranks \(actor_num_nodes 1 x actor_num_gpus_per_node 3\) cannot be divided by tensor_model",
        ),
        ("--actor-num-gpus-per-node 32", "global_batch_size 16 is smaller than the 32 data-parallel ranks"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "rollout_num_gpus 3 cannot be divided by"),
        ("--rollout-num-gpus 3 --rollout-max-engines 2", "rollout_max_engines 2 is below the 3 engines with which the"),
        ("--rollout-external-engine-addrs 10.0.0.7:1 --rollout-max-engines 2", "started and ended elsewhere; leave it"),
        ("--colocate --max-staleness 1", r"colocate cannot be combined with asynchronous training \(max_staleness 1"),
        ("--colocate --async-buffer-size 4", "Leave --colocate out"),
        ("--colocate --rollout-num-gpus 2", "rollout_num_gpus 2 and 1 of the trainer on a machine"),
        ("--colocate --rollout-services 2", "colocate with 2 rollout services: trainer and engines share the GPUs and"),
        ("--colocate --rollout-address 10.0.0.1:7001", "Start the rollout service at a loopback address, or leave"),
        ("--colocate --rollout-external-engine-addrs 127.0.0.1:3", "with engines that are started elsewhere: trainer"),
        ("--colocate --rollout-placement ray", "colocate with rollout_placement ray: trainer and engines share"),
        ("--colocate --actor-num-nodes 2", "Start `headrace up rollout --rollout-service K` on machine K and name one"),
        (f"{ON_TWO},10.0.0.1:7003", "actor_num_nodes 2 and rollout at 10.0.0.1:7002,10.0.0.1:7003: trainer and engin"),
        (
            f"{ON_TWO},10.0.0.2:7002 --update-weight-transport ipc",
            "Shared memory is one machine's: use --update-weight",
        ),
        (f"{ON_TWO},10.0.0.2:7002 --buffer-address 10.0.0.1:7001", "Name a folder that all machines see at the same"),
        ("--colocate --update-weight-transport collective", "Leave it out, which is ipc, or choose disk"),
        ("--colocate --sglang-enable-memory-saver", "engines have it where they give their memory up: set colocate"),
        ("--sglang-pp-size 2", "tensor-parallel. Choose their number with --rollout-num-gpus-per-engine"),
        ("--sglang-dp-size 2", "Start more of them with --rollout-num-gpus"),
        ("--sglang-dp-size 8 --sglang-enable-dp-attention", "Start more of them with --rollout-num-gpus"),
        ("--sglang-attn-dp-size 4", "Start more of them with --rollout-num-gpus"),
        ("--sglang-enable-dp-lm-head", "Start more of them with --rollout-num-gpus"),
        ("--sglang-nnodes 2", "an engine is on one machine"),
        ("--sglang-node-rank 1", "an engine is on one machine"),
        ("--sglang-dist-init-addr 10.0.0.1:5000", "an engine is on one machine"),
        ("--sglang-gpu-id-step 2", "Hide others from the run with CUDA_VISIBLE_DEVICES"),
        ("--sglang-use-ray", "Use --rollout-placement ray"),
        ("--sglang-disaggregation-mode prefill", "each engine computes prompts and responses"),
        ("--sglang-disaggregation-transfer-backend nixl", "each engine computes prompts and responses"),
        ("--sglang-disaggregation-bootstrap-port 8999", "each engine computes prompts and responses"),
        ("--sglang-disaggregation-mode null", "leave it out for SGLang's default"),
        ("--sglang-encoder-only", "each engine computes prompts and responses"),
        ("--sglang-elastic-ep-backend mooncake", "Start more of them with --rollout-num-gpus"),
        ("--sglang-dtype float16", "engines serve the weights that the trainer publishes, which are float32"),
        ("--sglang-dtype bfloat16", "leave --sglang-dtype out, or train with --bf16"),
        ("--sglang-dtype auto", "which are float32: leave --sglang-dtype out"),
        ("--sglang-dtype float32 --bf16", "which are bfloat16: leave --sglang-dtype out, or train without --bf16"),
        ("--sglang-dtype half --bf16", "which are bfloat16"),
        ("--offload-train", "offload_train has no effect without colocate: add --colocate or leave"),
        ("--no-offload-rollout", "offload_rollout has no effect without colocate: add --colocate or leave"),
        ("--offload", "--colocate turns both on; --no-offload-train or --no-offload-rollout turns one off"),
        ("--update-weights-interval 3", "makes tokens up to 2 steps old, and max_staleness is 0"),
        ("--kl-loss-coef 0.1", "kl_loss_coef has no effect without use_kl_loss: add --use-kl-loss or leave"),
        ("--tis-threshold 3", "tis_clip has no effect without use_tis"),
        (
            "--actor-num-nodes 2 --placement ray --buffer-address 10.0.0.1:7000",
            "cannot reach rollout, which is started on this machine's loopback",
        ),
        (
            "--actor-num-nodes 2 --placement ray --buffer-address 127.0.0.1:7000 --rollout-address 10.0.0.1:7001",
            "actor_num_nodes 2: ranks on other machines cannot reach buffer, which is at 127.0.0.1:7000",
        ),
        ("--wandb-project x", "wandb_project has no effect without use_wandb"),
        ("--custom-rm-path http://me:secret@host/judge", "custom_rm_path holds a URL with a password"),
        ("--max-tokens-per-gpu 4096", "max_tokens_per_gpu has no effect without use_dynamic_batch_size"),
        ("--use-dynamic-batch-size", "fills micro-batches up to max_tokens_per_gpu: pass --max-tokens-per-gpu"),
        (
            "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --micro-batch-size 2",
            "micro_batch_size 2 has no effect with use_dynamic_batch_size: leave it out",
        ),
        ("--no-balance-data --balance-by flops", "balance_by has no effect without balance_data"),
        ("--packing thd", "--packing: should be 'padded', 'packed' or 'shared_prompts', got 'thd'"),
        ("--eval-top-p 0.5", "eval_top_p has no effect without eval_prompt_data"),
        ("--sglang-api-key secret", "sglang api_key: engines listen on 127.0.0.1 and need no key"),
        ("--num-layers 12", "--num-layers 12 contradicts the checkpoint, whose config.json says 2"),
        ("--untie-embeddings-and-output-weights", "contradicts the checkpoint, whose config.json says False"),
        ("--hf-checkpoint /nowhere", "hf_checkpoint /nowhere is not a folder"),
        ("--prompt-data /nowhere.jsonl", "prompt_data /nowhere.jsonl does not exist"),
        ("--prompt-data /nowhere.jsonl@[3:1]", r"the slice holds no lines"),
        ("--prompt-data /nowhere.jsonl@[-1:]", r"write a slice as path@\[a:b\]"),
        ("--prompt-data-weights 1 2", "prompt_data_weights has no effect without prompt_data"),
        ("--streaming-data", "streaming_data has no effect without prompt_data"),
        ("--num-data-workers 2", "num_data_workers has no effect without streaming_data"),
        ("--mask-offpolicy-in-partial-rollout", "has no effect without partial_rollout"),
        ("--partial-rollout", "pass --mask-offpolicy-in-partial-rollout, or --max-staleness 1 or more"),
        ("--over-sampling-batch-size 1", "over_sampling_batch_size 1 is below rollout_batch_size 4"),
        ("--samples-per-insert 1", "samples_per_insert has no effect without min_size_to_sample"),
        (
            "--min-size-to-sample 8 --samples-per-insert 1 --samples-per-insert-error-buffer 2",
            "samples_per_insert_error_buffer of 2.5 or more, half of rollout_batch_size 4 plus one insert, not 2",
        ),
        ("--eval-prompt-data gsm8k /nowhere.jsonl", "eval_prompt_data gsm8k /nowhere.jsonl does not exist"),
        ("--custom-rm-path /nowhere.py:judge", "/nowhere.py does not exist"),
        ("--load /dev/null", "load /dev/null is not a folder"),
        ("--seq-length 4096", "--seq-length 4096 is longer than max_position_embeddings 2048 of the checkpoint"),
        ("--num-moe-experts 8", "--num-moe-experts 8 contradicts the checkpoint, whose config.json says"),
        ("--add-bias-linear", "--add-bias-linear True contradicts the checkpoint, whose config.json says False"),
        ("--position-embedding-type yarn", "--position-embedding-type: should be 'rope', got 'yarn'"),
        ("--recompute-granulariti full", "did you mean --recompute-granularity"),
        ("--recompute-granularity ful", "--recompute-granularity: should be 'full' or 'selective', got 'ful'"),
        ("--recompute-num-layers two", "--recompute-num-layers: should be a valid integer"),
        ("--recompute-granularity full --recompute-activations", "means recompute_granularity selective"),
        ("--moe-layer-freq sometimes", "--moe-layer-freq: .*got 'sometimes'"),
        ("--hidden-dropout 0.1", "--hidden-dropout: should be 0: a policy's log-probs must be the same in every pass"),
        ("--activation-func gelu", "activation_func cannot be set by a job: it is a Python object"),
        ("--use-megatron-fsdp", "use_megatron_fsdp cannot be set by a job: .*not its FSDP"),
        (
            "--muon-use-nesterov --moe-ncclep-zero-copy",
            "--moe-ncclep-zero-copy is a field of megatron-core 0.19, and 0.16",
        ),
        ("--end-wd 0.1", "goes from 0.01 to 0.1, and wd_incr_style is constant"),
        ("--lr-decay-style WSD", "lr_decay_style is WSD and wsd_decay_steps is None: set both or neither"),
        ("--keep-best-metric eval/gsm8k", "keep_best_metric has no effect without keep_best"),
        ("--keep-best 1 --keep-best-metric eval/gsm8k", "Let it wait for them with --eval-exact-version"),
        (
            "--initial-megatron-checkpoint /nowhere",
            "/nowhere has no manifest.json, and no latest_.*: name a step-… folder",
        ),
        ("--freeze-params mlp --train-params attn", "set the same thing: give only one"),
        ("--freeze-params layers.[0", "'layers.\\[0' is not a regular expression"),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "2 virtual stages on one pipeline rank have no effect: .* or leave them out",
        ),
        ("--microbatch-group-size-per-vp-stage 4", "cannot be set by a job: virtual stages take turns in rounds"),
        ("--optimizer sgd --use-distributed-optimizer", "Megatron-core distributes only Adam"),
        (
            "--actor-num-gpus-per-node 2 --context-parallel-size 2 --packing padded",
            "context_parallel_size 2 divides packed rows, and packing is padded",
        ),
        ("--optimizer muon", "--optimizer: should be 'adam' or 'sgd', got 'muon'"),
        ("--keep-old-actor --use-rollout-logprobs", "keep_old_actor has no effect: this loss does not use"),
        ("--keep-old-actor --loss-type sft_loss", "keep_old_actor has no effect: this loss does not use"),
        ("--keep-old-actor --loss-type custom_loss", "keep_old_actor has no effect with max_staleness 0"),
        ("--keep-old-actor", "keep_old_actor has no effect with max_staleness 0"),
        ("--ref-update-interval 2 --use-kl-loss", "ref_update_interval has no effect without kl_loss_coef or kl_coef"),
        ("--eval-prompt-data aime /a.jsonl@[9:0]", "eval_prompt_data /a.jsonl@.*: the slice holds no lines"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_wrong_flags(load_with, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with(*flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rolout]\n", r"job.toml: unknown section \[rolout\]: did you mean rollout\?"),
        ("[rollout]\nnum_rolout = 3\n", r"job.toml \[rollout\] num_rolout: unknown key: did you mean num_rollout\?"),
        ("[rollout]\neps_clip = 0.1\n", r"job.toml \[rollout\] eps_clip: unknown key here: it belongs in \[train\]"),
        ("[train]\neps_clip = 0.0\n", r"job.toml \[train\] eps_clip: should be greater than 0, got 0.0"),
        ("[megatron]\nnum_layer = 2\n", r"\[megatron\] num_layer: unknown key: did you mean num_layers\?"),
        ("eps_clip = 0.1\n", r"eps_clip must stand in a section: put it under \[train\]"),
        ("train = 3\n", "train is not a table"),
        ("[train\n", r"job.toml is not TOML: .*line 1"),
        (
            "[run]\nseed = 1\n",
            r"hf_checkpoint is not given: set it under \[model\] of the job file or pass --hf-checkpoint",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, [], {})


@pytest.mark.parametrize(
    "flags",
    [
        "--sglang-pp-size 1 --sglang-dp-size 1 --sglang-nnodes 1 --sglang-node-rank 0",
        "--sglang-ep-size 2 --sglang-gpu-id-step 1",
        "--sglang-dtype float",
        "--sglang-dtype bfloat16 --bf16",
    ],
)
def test_an_argument_of_sglangs_with_the_value_that_engines_have_anyway_is_taken(load_with, flags: str) -> None:
    assert load_with(*flags.split()).sglang


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job file .*job\.toml does not exist"):
        load(tmp_path / "job.toml", [], {})


def test_wrong_variables(load_with) -> None:
    with pytest.raises(ConfigError, match=r"unknown environment variable HEADRACE_SEDE: did you mean HEADRACE_SEED\?"):
        load_with(HEADRACE_SEDE="1")
    with pytest.raises(ConfigError, match="HEADRACE_SEED: should be a valid integer"):
        load_with(HEADRACE_SEED="one")


def test_two_batch_sizes_missing(model: Path) -> None:
    flags = ["--hf-checkpoint", str(model), "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2"]
    with pytest.raises(ConfigError, match="rollout_batch_size and global_batch_size are not given"):
        load(None, flags, {})


def test_a_batch_size_that_cannot_be_derived(model: Path) -> None:
    flags = ["--hf-checkpoint", str(model), "--rollout-batch-size", "4", "--n-samples-per-prompt", "8"]
    with pytest.raises(
        ConfigError, match=r"num_steps_per_rollout cannot be derived: .* = 32 samples, which .* 5 does not"
    ):
        load(None, [*flags, "--global-batch-size", "5"], {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', r"data.jsonl, line 2: not JSON: .*or pass --skip-bad-lines"),
        ('["b"]', r"line 2: must be a JSON object, is \['b'\]"),
        ('{"question": "b"}', r"line 2: no key 'prompt' \(input_key\); the keys are question"),
    ],
)
def test_a_bad_line_of_prompts_is_named_by_file_and_line(load_with, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_with("--prompt-data", str(path))
    assert load_with("--prompt-data", str(path), "--skip-bad-lines").data.skip_bad_lines


def test_a_hook_that_its_file_does_not_define(load_with, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def judge(args, sample): return 1.0\n")
    with pytest.raises(ConfigError, match=f"{path} does not define jugde"):
        load_with("--custom-rm-path", f"{path}:jugde")
    path.write_text("def judge(:\n")
    with pytest.raises(ConfigError, match="line 1: invalid syntax"):
        load_with("--custom-rm-path", f"{path}:judge")


def test_an_export_folder_with_something_in_it_is_refused_before_the_run(load_with, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="export exists and is not empty.*name a new folder"):
        load_with("--save-hf", str(tmp_path / "export"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--buffer-addresses", "a:1", "a:1"), "has an address twice"),
        (("--buffer-addresses", "a:1", "b:1", "--buffer-shard", "2"), "is not an index of the 2 buffer_addresses"),
        (("--buffer-addresses", "a:1", "b:1", "--buffer-address", "c:1"), "leave one of them out"),
        (("--buffer-addresses", "a:1", "b:1", "c:1", "d:1", "e:1"), "is less than the 5 shards"),
        (("--buffer-shard", "0"), "buffer_shard has no effect without buffer_addresses"),
        (
            ("--buffer-shards", "2", "--buffer-address", "a:1"),
            "2 contradicts buffer_address, which names 1 buffer: leave",
        ),
        (
            ("--buffer-shards", "2", "--buffer-addresses", "a:1", "b:1", "c:1"),
            "contradicts buffer_addresses, .* 3 buffers",
        ),
        (("--buffer-shards", "5"), "rollout_batch_size 4 is less than the 5 shards"),
        (("--buffer-shards", "1025"), "--buffer-shards: should be less than or equal to 1024"),
        (("--buffer-shards", "0"), "--buffer-shards: should be greater than 0"),
        (("--buffer-addresses", *(f"a:{port}" for port in range(1, 1026))), "at most 1024 items"),
    ],
)
def test_shards_that_do_not_add_up(load_with, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with(*flags)


def test_everybody_finds_all_shards(load_with) -> None:
    job = load_with("--buffer-addresses", "a:1", "b:1", "--buffer-shard", "1")
    assert job.services.buffer_address == "a:1,b:1"
    assert address_in(job, "buffer") == "b:1"


@pytest.mark.parametrize("name", CONSTANTS)
def test_an_option_that_is_a_constant_now_is_refused_wherever_a_job_names_it(
    load_with: Callable[..., Job], tmp_path: Path, name: str
) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} is not a flag of headrace: (it is a constant|a set of)"):
        load_with(flag, "1")
    with pytest.raises(ConfigError, match=f"HEADRACE_{name.upper()} is not a variable"):
        read_environment({f"HEADRACE_{name.upper()}": "1"}, options())
    file = tmp_path / "job.toml"
    file.write_text(f"[buffer]\n{name} = 1\n")
    with pytest.raises(ConfigError, match=f"{name}: not a key of headrace"):
        read_file(file, options())


def test_a_job_that_an_earlier_release_resolved_is_read_without_its_constants(
    load_with: Callable[..., Job], tmp_path: Path
) -> None:
    job = load_with()
    tree = job.model_dump(mode="json")
    tree["buffer"]["max_leases"] = 100_000
    (tmp_path / "job.json").write_text(json.dumps(tree))
    assert read_job(tmp_path / "job.json") == job
    assert "max_leases" not in {setting.name for setting in read_file(tmp_path / "job.json", options())}
