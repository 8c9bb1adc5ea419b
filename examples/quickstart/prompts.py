"""`prompts.py FOLDER`: train.jsonl and eval.jsonl with sums of two digits from reasoning_gym's chain_sum."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym

TRAIN_SIZE, EVAL_SIZE = 2000, 48
TRAIN_SEED, EVAL_SEED = 1, 2


def rows(size: int, seed: int) -> list[dict[str, str]]:
    """Prompt and label of each task; subtraction is left out, so answers are 2 to 18."""
    tasks = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1, allow_negation=False
    )
    return [
        {"prompt": f"{_expression(task['question'])}\nAnswer with one number.", "label": str(task["answer"])}
        for task in tasks
    ]


def _expression(question: str) -> str:
    """`State the final answer to the following arithmetic problem: 4 + 3 =` without the words around it."""
    return question.rpartition(":")[2].strip()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, seed in (("eval", EVAL_SIZE, EVAL_SEED), ("train", TRAIN_SIZE, TRAIN_SEED)):
        lines = [json.dumps(row) + "\n" for row in rows(size, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
