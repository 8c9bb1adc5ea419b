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

REFUSED = r"""
--rollout-bach-size 4 => --rollout-bach-size --rollout-batch-size
--no-lr => --no-lr
--eps-clip=-1 => --eps-clip
--num-rollout many => --num-rollout many
--advantage-estimator magic => --advantage-estimator magic
--eval-prompt-data gsm8k => --eval-prompt-data gsm8k
--global-batch-size 5 => global_batch_size 5
--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2 => actor_num_gpus_per_node 3 tensor_model_parallel_size 2
--actor-num-gpus-per-node 32 => 32
--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 => rollout_num_gpus 3 rollout_num_gpus_per_engine 2
--rollout-num-gpus 3 --rollout-max-engines 2 => --rollout-num-gpus 3 rollout_max_engines 2
--colocate --max-staleness 1 => colocate max_staleness 1
--colocate --rollout-num-gpus 2 => colocate rollout_num_gpus 2
--colocate --rollout-address 10.0.0.1:7001 => colocate 10.0.0.1:7001
--colocate --rollout-placement ray => colocate rollout_placement ray
--colocate --actor-num-nodes 2 => colocate actor_num_nodes 2 --rollout-service
--colocate --update-weight-transport collective => colocate update_weight_transport collective
--colocate --sglang-enable-memory-saver => colocate --sglang-enable-memory-saver
--sglang-pp-size 2 => --sglang-pp-size 2 rollout_num_gpus_per_engine 1
--sglang-pp-size none => --sglang-pp-size none
--sglang-dp-size 8 => --sglang-dp-size 8 --rollout-num-gpus --sglang-enable-dp-attention
--sglang-dp-size 8 --sglang-enable-dp-attention => --sglang-dp-size 8 rollout_num_gpus_per_engine 1
--sglang-enable-dp-attention => --sglang-enable-dp-attention --sglang-dp-size 1
--sglang-attn-dp-size 2 => --sglang-attn-dp-size 2 --sglang-dp-size
--sglang-nnodes 2 => 2 machines rollout_num_gpus_per_engine 1 --sglang-nnodes
--sglang-node-rank 1 => --sglang-node-rank 1 --sglang-nnodes
--sglang-dist-init-addr 10.0.0.7:5000 => --sglang-dist-init-addr 10.0.0.7:5000 --sglang-nnodes
--sglang-gpu-id-step 2 => --sglang-gpu-id-step 2
--sglang-use-ray => --sglang-use-ray --rollout-placement
--sglang-disaggregation-transfer-backend nixl => --sglang-disaggregation-transfer-backend prefill
--sglang-disaggregation-mode null => --sglang-disaggregation-mode null
--sglang-dtype float16 => --sglang-dtype float16 --bf16
--offload-train => offload_train --colocate
--sglang-kv-cache-dtype fp8 => --sglang-kv-cache-dtype fp8 fp8_e4m3
--true-on-policy-mode --num-steps-per-rollout 1 --sglang-kv-cache-dtype fp8_e4m3 => true_on_policy_mode fp8_e4m3
--offload-modules core_attn => offload_modules --fine-grained-activation-offloading
--min-offloaded-tensor-size 64 => min_offloaded_tensor_size --fine-grained-activation-offloading
--cpu-offloading-num-layers 1 => cpu_offloading_num_layers --cpu-offloading
--cpu-offloading => --cpu-offloading only on a GPU
--fine-grained-activation-offloading --offload-modules core_attn => --fine-grained-activation-offloading only on a GPU
--mtp-num-layers 1 => mtp_num_layers layers predict
--mtp-loss-scaling-factor 0.2 => mtp_loss_scaling_factor
--enable-mtp-training => --enable-mtp-training not trained
--offload => offload --colocate --no-offload-train --no-offload-rollout
--update-weights-interval 3 => update_weights_interval 3 --max-staleness
--kl-loss-coef 0.1 => kl_loss_coef --use-kl-loss
--tis-threshold 3 => --use-tis --tis-clip
--wandb-project x => wandb_project --use-wandb
--custom-rm-path http://me:secret@host/judge => custom_rm_path password
--max-tokens-per-gpu 4096 => max_tokens_per_gpu --use-dynamic-batch-size
--use-dynamic-batch-size => use_dynamic_batch_size --max-tokens-per-gpu
--packing thd => packing thd
--eval-top-p 0.5 => eval_top_p --eval-prompt-data --eval-config
--sglang-api-key secret => --sglang-api-key
--num-layers 12 => --num-layers 12
--hf-checkpoint /nowhere => hf_checkpoint /nowhere
--prompt-data /nowhere.jsonl => prompt_data /nowhere.jsonl
--prompt-data /nowhere.jsonl@[3:1] => prompt_data /nowhere.jsonl@[3:1]
--prompt-data-weights 1 2 => prompt_data_weights --prompt-data
--streaming-data => streaming_data --prompt-data
--num-data-workers 2 => num_data_workers --streaming-data
--mask-offpolicy-in-partial-rollout => mask_offpolicy_in_partial_rollout --partial-rollout
--partial-rollout => partial_rollout --mask-offpolicy-in-partial-rollout --max-staleness
--over-sampling-batch-size 1 => over_sampling_batch_size 1
--samples-per-insert 1 => samples_per_insert --min-size-to-sample
--eval-prompt-data gsm8k /nowhere.jsonl => eval_prompt_data gsm8k /nowhere.jsonl
--custom-rm-path /nowhere.py:judge => custom_rm_path /nowhere.py:judge
--load /dev/null => load /dev/null
--seq-length 4096 => --seq-length 4096
--add-bias-linear => --add-bias-linear
--position-embedding-type yarn => --position-embedding-type yarn
--recompute-granulariti full => --recompute-granulariti --recompute-granularity
--recompute-granularity full --recompute-activations => recompute_granularity full recompute_activations
--moe-layer-freq sometimes => --moe-layer-freq sometimes
--hidden-dropout 0.1 => --hidden-dropout 0.1
--activation-func gelu => activation_func gelu
--use-megatron-fsdp => use_megatron_fsdp
--muon-use-nesterov --moe-ncclep-zero-copy => --moe-ncclep-zero-copy
--end-wd 0.1 => end_wd 0.1
--lr-decay-style WSD => lr_decay_style WSD
--keep-best-metric eval/gsm8k => keep_best_metric --keep-best
--keep-best 1 --keep-best-metric eval/gsm8k => keep_best_metric eval/gsm8k --eval-exact-version
--initial-megatron-checkpoint /nowhere => initial_megatron_checkpoint /nowhere
--freeze-params mlp --train-params attn => freeze_params_name_list mlp
--freeze-params layers.[0 => --freeze-params layers.[0
--num-virtual-stages-per-pipeline-rank 2 => 2 --pipeline-model-parallel-size
--microbatch-group-size-per-vp-stage 4 => microbatch_group_size_per_vp_stage 4
--optimizer sgd --use-distributed-optimizer => optimizer sgd use_distributed_optimizer
--actor-num-gpus-per-node 2 --context-parallel-size 2 --packing padded => 2 context_parallel_size packing padded
--optimizer muon => optimizer muon
--keep-old-actor --use-rollout-logprobs => keep_old_actor use_rollout_logprobs
--keep-old-actor --loss-type sft_loss => keep_old_actor
--keep-old-actor => keep_old_actor
--ref-update-interval 2 --use-kl-loss => ref_update_interval --kl-loss-coef --kl-coef
stray => stray
--buffer-shard 0 => buffer_shard --buffer-address
--buffer-shards 2 --buffer-address a:1 => buffer_shards 2 buffer_address
--buffer-shards 5 => 5
--use-routing-replay => use_routing_replay
--use-rollout-routing-replay => use_rollout_routing_replay
--kl-coef 0.1 => kl_coef --advantage-estimator --use-kl-loss
--gamma 0.9 => gamma --advantage-estimator
--critic-lr 1e-5 => critic_lr --advantage-estimator
--advantage-estimator rloo --disable-rewards-normalization => advantage_estimator disable_rewards_normalization
--advantage-estimator ppo --disable-grpo-std-normalization => advantage_estimator disable_grpo_std_normalization
--advantage-estimator cispo --eps-clip-c 3 => advantage_estimator eps_clip_c
--mis-level geometric => --use-tis --tis-level
--rs-veto-threshold 1e-4 => rs_veto_threshold --use-rs
--use-rs --rs-lower-bound 3 => rs_lower_bound 3
--custom-tis-function-path a.b => custom_tis_function_path --use-tis
--opsm-delta 0.1 => opsm_delta --use-opsm
--custom-loss-function-path a.b => custom_loss_function_path --loss-type
--loss-type sft_loss --use-tis => loss_type use_tis
--loss-type sft_loss --entropy-coef 0.1 => loss_type entropy_coef
--loss-type sft_loss --advantage-estimator ppo => loss_type advantage_estimator
--loss-mask-type qwen3 => loss_mask_type --loss-type
--loss-type sft_loss --loss-mask-type qwen3 => loss_mask_type
--loss-type custom_loss => loss_type custom_loss --custom-loss-function-path
--calculate-per-token-loss --loss-constant-length 64 => calculate_per_token_loss loss_constant_length 64
--use-tis --tis-clip 2 --tis-clip-low 2 => tis_clip 2 tis_clip_low
--use-opd => use_opd --opd-teacher-url --opd-teacher-load --custom-generate-function-path
--use-opd --opd-type megatron => opd_type megatron --opd-teacher-load
--use-opd --opd-teacher-url http://127.0.0.1:1 --opd-type megatron => opd_teacher_url opd_type
--use-opd --opd-teacher-url there:1 => --opd-teacher-url there:1
--use-opd --opd-teacher-url http://127.0.0.1:1 --rollout-temperature 0.7 => rollout_temperature 0.7 --opd-type
--kl-reward-type k3 => kl_reward_type --kl-coef
--advantage-estimator ppo --kl-coef 0.01 --use-kl-loss --kl-loss-coef 0.001 => kl_coef 0.01 use_kl_loss
--use-tis --use-rollout-logprobs => use_tis use_rollout_logprobs
--true-on-policy-mode => true_on_policy_mode
--true-on-policy-mode --num-steps-per-rollout 1 --max-staleness 1 => true_on_policy_mode 1 max_staleness
--true-on-policy-mode --num-steps-per-rollout 1 --use-rollout-logprobs => true_on_policy_mode use_rollout_logprobs
--true-on-policy-mode --num-steps-per-rollout 1 --rollout-top-k 50 => rollout_top_k 50 --keep-sampling-mask
--keep-sampling-mask => keep_sampling_mask --rollout-top-p --rollout-top-k
--keep-sampling-mask --rollout-top-p 0.9 --loss-type sft_loss => keep_sampling_mask loss_type
--keep-sampling-mask --rollout-top-p 0.9 --use-opd --opd-teacher-url http://127.0.0.1:1 => keep_sampling_mask use_opd
--keep-sampling-mask --rollout-top-k 5000 => 4096 rollout_top_k 5000 --sglang-sampling-mask-max-tokens
--keep-sampling-mask --rollout-top-p 0.9 --sglang-speculative-algorithm EAGLE => keep_sampling_mask EAGLE DFLASH
--sglang-speculative-draft-model-path d --update-weight-transport disk --update-weight-disk-path w => d disk NGRAM
--lora-alpha 16 => lora_alpha --lora-rank
--lora-rank 4 --freeze-params-name-list mlp => lora_rank freeze_params_name_list mlp
--lora-rank 4 --lora-target-modules all-linear q_proj => --lora-target-modules all-linear q_proj
--lora-rank 4 --lora-init pissa => --lora-init pissa
--lora-rank 4 --lora-dropout 0.1 --true-on-policy-mode => lora_dropout 0.1 true_on_policy_mode
--save-debug-rollout-data kept/all => --save-debug-rollout-data kept/all
--agent-function-path agents.run --partial-rollout --max-staleness 1 => agent_function_path partial_rollout
--debug-train-only => debug_train_only --save-debug-rollout-data --load-debug-rollout-data
--buffer-address a:1,a:1 => buffer_address a:1,a:1
--buffer-address a:1,b:1 --buffer-shard 2 => buffer_address buffer_shard 2
--buffer-address a:1,b:1,c:1,d:1,e:1 => rollout_batch_size 4 5
--buffer-shards 2 --buffer-address a:1,b:1,c:1 => buffer_shards 2 buffer_address
--eval-timeout-seconds 3 => --eval-timeout-seconds --rollout-timeout-seconds
--rollout-external-engine-addrs 10.0.0.7:1 --rollout-max-engines 2 =>
    rollout_external_engine_addrs rollout_max_engines 2
--colocate --actor-num-nodes 2 --rollout-address 10.0.0.1:7002,10.0.0.1:7003 =>
    colocate actor_num_nodes 2 --rollout-address
--colocate --actor-num-nodes 2 --rollout-address 10.0.0.1:7002,10.0.0.2:7002 --update-weight-transport ipc =>
    colocate actor_num_nodes 2 update_weight_transport
--colocate --actor-num-nodes 2 --rollout-address 10.0.0.1:7002,10.0.0.2:7002 --buffer-address 10.0.0.1:7001 =>
    10.0.0.1:7002,10.0.0.2:7002 --update-weight-disk-path
--actor-num-nodes 2 --placement ray --buffer-address 10.0.0.1:7000 =>
    actor_num_nodes 2 --rollout-address --service-host
--actor-num-nodes 2 --placement ray --buffer-address 127.0.0.1:7000 --rollout-address 10.0.0.1:7001 =>
    actor_num_nodes 2 --buffer-address 127.0.0.1:7000
--use-dynamic-batch-size --max-tokens-per-gpu 4096 --micro-batch-size 2 =>
    use_dynamic_batch_size max_tokens_per_gpu micro_batch_size 2
--disable-rewards-normalization --disable-grpo-std-normalization =>
    disable_rewards_normalization disable_grpo_std_normalization
--advantage-estimator reinforce_plus_plus_baseline =>
    advantage_estimator reinforce_plus_plus_baseline --normalize-advantages
--debug-rollout-only --load-debug-rollout-data kept/{rollout_id}.samples =>
    debug_rollout_only load_debug_rollout_data
--save-debug-rollout-data again/{rollout_id} --load-debug-rollout-data kept/{rollout_id}.samples =>
    save_debug_rollout_data again/{rollout_id} load_debug_rollout_data
--agent-function-path agents.run --custom-generate-function-path a.py:g =>
    agent_function_path custom_generate_function_path a.py:g
--tinker-port 8700 --update-weight-transport disk => update_weight_transport disk tinker_port
--tinker-port 8700 --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 =>
    pipeline_model_parallel_size 2 tinker_port
--tinker-port 8700 --lora-rank 8 --lora-alpha 16 => tinker_port lora_alpha
--tinker-host 0.0.0.0 => tinker_host --tinker-port
--agent-function-path agents.run --generate-per-sample =>
    generate_per_sample --custom-generate-function-path --eval-config
"""
"""A command line, and the words that its refusal says: the option, its value, and the flag that is the way out."""


@pytest.mark.parametrize("line", REFUSED.replace("=>\n", "=>").strip().splitlines())
def test_a_wrong_command_line_is_refused_with_the_option_the_value_and_the_way_out(load_with, line: str) -> None:
    flags, _, said = line.partition("=>")
    with pytest.raises(ConfigError) as refused:
        load_with(*flags.split())
    assert [word for word in said.split() if word not in refused.value.message] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rolout]\n", r"job.toml: unknown section \[rolout\]: did you mean rollout\?"),
        ("[rollout]\neps_clip = 0.1\n", r"job.toml \[rollout\] eps_clip: unknown key here: it belongs in \[train\]"),
        ("[train]\neps_clip = 0.0\n", r"job.toml \[train\] eps_clip: should be greater than 0, got 0.0"),
        ("eps_clip = 0.1\n", r"eps_clip must stand in a section: put it under \[train\]"),
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


def test_wrong_variables(load_with) -> None:
    with pytest.raises(ConfigError, match=r"unknown environment variable HEADRACE_SEDE: did you mean HEADRACE_SEED\?"):
        load_with(HEADRACE_SEDE="1")
    with pytest.raises(ConfigError, match="HEADRACE_SEED: should be a valid integer"):
        load_with(HEADRACE_SEED="one")


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
