"""Configurations in the form of prime-rl's own. Written here, not copied."""

from __future__ import annotations

from collections.abc import Mapping

_ENV = """
[[orchestrator.train.env]]
name = "reverse-text"
taskset = { id = "reverse-text" }
harness = { id = "null", runtime = { type = "subprocess" } }
"""

SCRIPTS: Mapping[str, str] = {
    "reverse-text/rl.toml": """
max_steps = 20
seq_len = 2048
[deployment]
num_train_gpus = 1
num_infer_gpus = 1
[model]
name = "org/Qwen3-0.6B-Reverse-Text"
[wandb]
project = "reverse-text"
name = "reverse-text"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[trainer.optim]
lr = 3e-6
[ckpt]
[inference]
[orchestrator.renderer]
name = "prime-qwen3"
"""
    + _ENV,
    "wiki-search/rl.toml": """
max_steps = 200
seq_len = 4096
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.model.lora]
rank = 8
dropout = 0.0
target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
[orchestrator]
batch_size = 128
group_size = 16
[inference.model]
tool_call_parser = "hermes"
"""
    + _ENV,
    "qwen3-30b-a3b/4-nodes.toml": """
max_steps = 1000
seq_len = 131072
[log]
level = "debug"
[slurm]
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 2
[ckpt]
interval = 100
[weight_broadcast]
type = "nccl"
[model]
name = "Qwen/Qwen3-30B-A3B-Thinking-2507"
[trainer.model]
impl = "custom"
attn = "flash_attention_3"
ep = 8
cp = 2
[trainer.model.compile]
[trainer.model.ac]
freq = 1
[trainer.optim]
type = "adamw"
lr = 1e-6
[orchestrator]
batch_size = 512
max_off_policy_steps = 16
[orchestrator.concurrency]
initial_inflight = 1024
[inference.vllm]
tensor_parallel_size = 8
""",
    "reverse-text/sft.toml": """
max_steps = 100
[deployment]
num_train_gpus = 1
num_infer_gpus = 1
[model]
name = "org/Qwen3-0.6B"
[data]
seq_len = 4096
batch_size = 32
[[data.source]]
dataset = "org/R1-reverse-1000"
[optim]
lr = 2e-5
[eval]
interval = 25
""",
    "reverse-text/earlier.toml": """
max_steps = 100
max_async_level = 2
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 128
[[orchestrator.env]]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[inference.parallel]
tp = 2
""",
}
