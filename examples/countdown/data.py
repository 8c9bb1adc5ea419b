"""Writes train.jsonl and eval.jsonl: three numbers and a target that they can make with + and -."""

import json
import random
from pathlib import Path

END = "<|im_end|>"
PROMPT = (
    f"Numbers: 2 7 4. Target: 9. Answer: 7 + 4 - 2{END}\n"
    f"Numbers: 3 5 2. Target: 10. Answer: 3 + 5 + 2{END}\n"
    "Numbers: {numbers}. Target: {target}. Answer:"
)


def puzzle(draw):
    numbers = [draw.randint(1, 9) for _ in range(3)]
    expression = f"{numbers[0]} {draw.choice('+-')} {numbers[1]} {draw.choice('+-')} {numbers[2]}"
    target = eval(expression)  # noqa: S307  # our own
    draw.shuffle(numbers)
    return tuple(numbers), target


def row(numbers, target):
    prompt = PROMPT.format(numbers=" ".join(map(str, numbers)), target=target)
    return {"prompt": prompt, "label": str(target), "metadata": {"numbers": numbers}}


def main(folder=Path()):
    draw = random.Random(1)
    puzzles = list(dict.fromkeys(puzzle(draw) for _ in range(3000)))
    rows = [row(numbers, target) for numbers, target in puzzles if target >= 0]
    for name, part in (("eval", rows[:64]), ("train", rows[64:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
