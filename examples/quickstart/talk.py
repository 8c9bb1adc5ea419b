"""`talk.py BEFORE AFTER`: asks both models the same questions, greedily, in the form they were trained on."""

from __future__ import annotations

import sys

import torch
from prompts import EXAMPLE
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("4 + 3 =", "9 - 2 =", "7 + 8 =")


def answers(folder: str) -> list[str]:
    """One answer a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [_answer(tokenizer, model, question) for question in QUESTIONS]


def _answer(tokenizer, model, question: str) -> str:
    inputs = tokenizer(EXAMPLE + question, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    before, after = (answers(folder) for folder in sys.argv[1:3])
    for question, first, second in zip(QUESTIONS, before, after, strict=True):
        print(f"  user    {question.splitlines()[0]}\n  before  {first!r}\n  after   {second!r}")
