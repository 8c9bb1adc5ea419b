"""`talk.py BEFORE AFTER QUESTIONS`: both models answer the same held-out questions, sampled as they are in training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ASKED = 8
SEED = 1


def answers(folder: str, prompts: list[str]) -> list[str]:
    """One answer a question, as much of it as a rollout may have."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(SEED)
    return [_answer(tokenizer, model, prompt) for prompt in prompts]


def _answer(tokenizer, model, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=5, do_sample=True, top_k=0)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[3]).read_text().splitlines()[:ASKED]]
    before, after = (answers(folder, [row["prompt"] for row in rows]) for folder in sys.argv[1:3])
    for row, first, second in zip(rows, before, after, strict=True):
        marks = ["right" if answer == row["label"] else "wrong" for answer in (first, second)]
        question = row["prompt"].splitlines()[-1]
        print(f"  {question:10} before  {first!r:16} {marks[0]}   after  {second!r:16} {marks[1]}")
