"""Scripts in the form of TRL's own examples, with the flags that start them. Written here, not copied."""

# ruff: noqa: E501, SIM905

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PARSED = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward
"""
_MAIN = """
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = dict(revision=model_args.model_revision)
"""
_NUMINA = """
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])
    train_dataset = train_dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    train_dataset = train_dataset.remove_columns(["messages", "problem"])
"""
_INNER = """
    def accuracy_reward(completions, solution, **kwargs):
        return [float(text == answer) for text, answer in zip(completions, solution)]
"""
_TRAIN = """
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, args=training_args, reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset, eval_dataset=eval_dataset, peft_config=get_peft_config(model_args),
    )
    trainer.train()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
"""
_GROUP_FLAGS = (
    "--model_name_or_path Qwen/Qwen3-0.6B --output_dir gspo-Qwen3-0.6B --learning_rate 1e-5 --dtype bfloat16 "
    "--max_prompt_length 2048 --max_completion_length 1024 --use_peft --lora_target_modules q_proj, v_proj "
    "--log_completions --per_device_train_batch_size 8 --num_generations 8 --gradient_accumulation_steps 2"
)
_SFT = """
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

def main(script_args, training_args, model_args):
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = SFTTrainer(
        model=model, args=training_args, train_dataset=dataset[script_args.dataset_train_split],
        processing_class=tokenizer, peft_config=get_peft_config(model_args),
    )
    trainer.train()

if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
"""

SCRIPTS: Mapping[str, Sequence[str]] = {
    "gspo.py": (
        _PARSED + _MAIN + _NUMINA + _INNER + _TRAIN,
        *f"{_GROUP_FLAGS} --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 "
        "--loss_type grpo --steps_per_generation 8".split(),
    ),
    "grpo_vlm.py": (
        _PARSED + _MAIN + _NUMINA.replace('"AI-MO/NuminaMath-TIR"', '"lmms-lab/multimodal-open-r1-8k-verified"') + _INNER
        + _TRAIN, *f"{_GROUP_FLAGS} --use_vllm --vllm_mode colocate --gradient_checkpointing".split(),
    ),
    "grpo_agent.py": (
        _PARSED + """
def correctness_reward(completions, answer, **kwargs):
    return [1.0 for _ in completions]

def structure_reward(completions, **kwargs):
    return [1.0 for _ in completions]
""" + _MAIN + """
    dataset = load_dataset("qgallouedec/biogrid_qa", split="train")
    dataset = dataset.filter(lambda example: True)
    dataset = dataset.map(format_example, remove_columns=["question"])
    train_dataset = dataset
    eval_dataset = None
    training_args.chat_template_kwargs = {"enable_thinking": False}
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, train_dataset=train_dataset, eval_dataset=eval_dataset,
        tools=[query_biogrid], reward_funcs=[correctness_reward, structure_reward], args=training_args,
    )
""", *"--model_name_or_path Qwen/Qwen3-1.7B --output_dir out --push_to_hub True --use_vllm True --vllm_mode colocate "
        "--max_completion_length 1024 --report_to trackio --log_completions True --max_steps 400".split(),
    ),
    "rloo.py": (
        """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward, think_format_reward

def main():
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])
    train_dataset = train_dataset.map(make_conversation, remove_columns=["messages", "problem"])
    training_args = RLOOConfig(
        output_dir="out", model_init_kwargs={"dtype": torch.bfloat16}, learning_rate=1e-5, log_completions=True,
        num_completions_to_print=2, max_completion_length=1024, gradient_accumulation_steps=2, steps_per_generation=8,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5, run_name="Qwen3-0.6B-RLOO-NuminaMath-TIR",
    )
    trainer = RLOOTrainer(
        model="Qwen/Qwen3-0.6B", args=training_args, reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset, eval_dataset=eval_dataset, peft_config=LoraConfig(),
    )
    trainer.train()

if __name__ == "__main__":
    main()
""",
    ),
    "sft.py": (
        _SFT, *"--model_name_or_path=facebook/opt-350m --report_to=wandb --learning_rate=1.41e-5 "
        "--dataset_name=timdettmers/openassistant-guanaco --per_device_train_batch_size=64 "
        "--gradient_accumulation_steps=16 --output_dir=sft --logging_steps=1 --num_train_epochs=3 --max_steps=-1 "
        "--push_to_hub --gradient_checkpointing --use_peft --lora_r=64 --lora_alpha=16".split(),
    ),
    "sft_gpt_oss.py": (
        _SFT, *"--dtype bfloat16 --model_name_or_path openai/gpt-oss-20b --packing true packing_strategy wrapped "
        "--run_name 20b-full-eager --attn_implementation kernels-community/vllm-flash-attn3 --dataset_num_proc 12 "
        "--dataset_name HuggingFaceH4/Multilingual-Thinking --gradient_checkpointing --max_length 4096 "
        "--per_device_train_batch_size 2 --num_train_epochs 1 --logging_steps 1 --warmup_ratio 0.03 "
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs".split(), '{"min_lr_rate": 0.1}',
        *"--output_dir gpt-oss-20b --report_to trackio --seed 42".split(),
    ),
    "async_grpo.py": (
        """
from datasets import load_dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.rewards import accuracy_reward

def main() -> None:
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    dataset = dataset.map(format_sample, remove_columns=dataset.column_names)
    config = AsyncGRPOConfig(
        output_dir="async_grpo_gsm8k", save_strategy="no", per_device_train_batch_size=16,
        gradient_accumulation_steps=2, max_completion_length=1024, chat_template_kwargs={"enable_thinking": False},
        max_steps=200, learning_rate=1e-5, report_to="trackio", project="async-grpo-gsm8k", log_completions=True,
    )
    trainer = AsyncGRPOTrainer(
        model="Qwen/Qwen3-0.6B", args=config, train_dataset=dataset, reward_funcs=accuracy_reward,
    )
    trainer.train()
""",
    ),
    "maxrl.py": (
        _PARSED + """
def accuracy_reward(completions, answer, **kwargs):
    return [1.0 for _ in completions]
""" + _MAIN + """
    training_args.scale_rewards = "mean"
    training_args.multi_objective_aggregation = "sum_then_normalize"
    model_name = model_args.model_name_or_path or "Qwen/Qwen2.5-1.5B-Instruct"
    dataset_name = script_args.dataset_name if script_args.dataset_name else "AI-MO/NuminaMath-CoT"
    all_splits = load_dataset(dataset_name)
    raw_train = all_splits["train"]
    dataset = raw_train.map(format_example, remove_columns=raw_train.column_names)
    trainer = GRPOTrainer(
        model=model_name, args=training_args, train_dataset=dataset, eval_dataset=None, reward_funcs=accuracy_reward,
    )
""", *"--output_dir maxrl --learning_rate 1e-6 --num_generations 8 --max_completion_length 1024 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 500 --report_to wandb".split(),
    ),
    "grpo_2048.py": (
        """
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def reward_score(environments, **kwargs):
    return [env.score for env in environments]

def main() -> None:
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Play"}] for _ in range(1000)]})
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-4B", train_dataset=dataset, reward_funcs=reward_score,
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False}, logging_steps=1, log_completions=True,
            report_to="trackio", trackio_space_id="trl-2048", max_completion_length=2048,
            per_device_train_batch_size=4, gradient_accumulation_steps=2,
        ),
        environment_factory=Game2048Env, peft_config=LoraConfig(),
    )
    trainer.train()
""",
    ),
    "quickstart.py": (
        """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
""",
    ),
    "cli.sh": (
        """
export TRACKIO_PROJECT="x"
trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/tldr \\
    --reward_model_name_or_path org/reward --num_generations 8 --max_steps 100
""",
    ),
    "accelerate.sh": (
        """
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml \\
    examples/scripts/sft_vlm.py \\
    --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --model_name_or_path llava-hf/llava-1.5-7b-hf \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --bf16 --torch_dtype bfloat16 \\
    --gradient_checkpointing
""",
    ),
}  # fmt: skip
