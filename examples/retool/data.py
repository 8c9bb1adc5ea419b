"""Writes train.jsonl and eval.jsonl: questions that a small model answers by a program, and not by heart."""

import json
import random
from pathlib import Path

END = "<|im_end|>"
EXAMPLES = (("What is 12 * 34 + 5?", "12 * 34 + 5"), ("What is the sum of 1 to 20?", "sum(range(1, 21))"))


def example(question, expression):
    value = eval(expression)  # noqa: S307  # our own
    return f"{question}\n<code>print({expression})</code>\n<output>{value}</output>\nThe answer is {value}{END}\n"


def question(draw):
    """A question and its answer."""
    a, b, c = draw.randint(2, 30), draw.randint(31, 99), draw.randint(2, 99)
    return draw.choice(
        (
            (f"What is {b} * {c} - {a}?", b * c - a),
            (f"What is the sum of {a} to {b}?", sum(range(a, b + 1))),
            (f"What is {b} squared plus {c} squared?", b * b + c * c),
            (f"What is the remainder of {b * c + a} divided by {b}?", a % b),
        )
    )


def main(folder=Path()):
    draw = random.Random(1)
    shown = "".join(example(*each) for each in EXAMPLES)
    questions = dict(question(draw) for _ in range(1000))
    rows = [{"prompt": f"{shown}{asked}\n", "label": str(answer)} for asked, answer in questions.items()]
    for name, part in (("eval", rows[:48]), ("train", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
