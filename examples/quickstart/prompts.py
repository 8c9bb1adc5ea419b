"""`prompts.py FOLDER`: train.jsonl and eval.jsonl with sums and differences of two digits, by reasoning_gym."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym

SEED = 1
DRAWN = 3000
EVAL_SIZE = 48


EXAMPLE = "2 + 2 = 4<|im_end|>\n"
"""One worked sum tells a small model what is wanted, in nine tokens; an instruction takes thirty.

It ends as an answer should. Without that mark one answer in fifty stops after its number, too few to learn it from.
"""

Row = dict[str, str]


def rows() -> list[Row]:
    """Prompt and label of each task that chain_sum draws; some come several times."""
    tasks = reasoning_gym.create_dataset(
        "chain_sum", size=DRAWN, seed=SEED, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return [{"prompt": EXAMPLE + _expression(task["question"]), "label": str(task["answer"])} for task in tasks]


def _expression(question: str) -> str:
    """`State the final answer to the following arithmetic problem: 4 + 3 =` without the words around it."""
    return question.rpartition(":")[2].strip()


def main(folder: Path) -> None:
    """The first tasks are for evaluation and in no way in the training data."""
    drawn = rows()
    distinct = {row["prompt"]: row for row in drawn}
    held_out = list(distinct.values())[:EVAL_SIZE]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "eval.jsonl", held_out)
    _write(folder / "train.jsonl", [row for row in drawn if row not in held_out])


def _write(path: Path, lines: list[Row]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
