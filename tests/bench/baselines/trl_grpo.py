"""One half of tests/bench/against_trl.py, in TRL's own environment: `trl_grpo.py MODEL PROMPTS STEPS [RANK]`.

It prints JSON. As fast as TRL goes on a CPU: the whole batch in one pass, no gradient checkpointing, no reference
model. With RANK it trains peft's LoRA on all linear layers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 16


class Stopwatch(TrainerCallback):
    """When each step ended, on the wall's clock and on the processor's."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.time(), time.process_time()))
        print(f"  TRL: step {len(self.ends)}", file=sys.stderr, flush=True)


class Timed(GRPOTrainer):
    """Keeps how long each step's answers took, rewards included."""

    def __init__(self, *words: Any, **named: Any) -> None:
        self.generation: list[float] = []
        super().__init__(*words, **named)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.time()
        inputs = super()._prepare_inputs(generation_batch)
        self.generation.append(time.time() - started)
        return inputs


def bare_and_right(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """0.3 for a bare integer, 0.7 more for the right one."""
    words = [text.strip() for text in completions]
    return [
        0.3 * word.lstrip("-").isdigit() + 0.7 * (word == wanted) for word, wanted in zip(words, label, strict=True)
    ]


def main(model: str, prompts: str, steps: int, rank: int | None = None) -> None:
    with open(prompts) as lines, tempfile.TemporaryDirectory() as folder:
        stopwatch = Stopwatch()
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            reward_funcs=bare_and_right,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=NEW_TOKENS,
                temperature=1.0,
                beta=0.0,
                learning_rate=1e-9,
                lr_scheduler_type="constant",
                max_steps=steps,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[stopwatch],
            peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None,
        )
        trainer.train()
        lengths = [
            row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row
        ]
    print(json.dumps({"ends": stopwatch.ends, "lengths": lengths, "generation": trainer.generation}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
