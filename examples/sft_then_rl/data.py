"""Writes sft.jsonl (solved sums), train.jsonl (sums to learn by reward) and eval.jsonl (sums of neither)."""

import json
import random
from pathlib import Path


def asked(task):
    return {"role": "user", "content": f"What is {task}?"}


def main(folder=Path()):
    tasks = [(f"{a} + {b}", a + b) for a in range(10) for b in range(10)]
    tasks += [(f"{a} - {b}", a - b) for a in range(10) for b in range(a + 1)]
    random.Random(1).shuffle(tasks)
    solved = [{"prompt": [asked(task), {"role": "assistant", "content": str(result)}]} for task, result in tasks[:32]]
    open_ones = [{"prompt": [asked(task)], "label": str(result)} for task, result in tasks[32:]]
    for name, part in (("sft", solved), ("eval", open_ones[:48]), ("train", open_ones[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
