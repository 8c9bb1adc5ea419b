"""Writes train.jsonl and eval.jsonl: small functions to write, each with the tests that score it."""

import json
import random
from pathlib import Path

TASKS = {  # (the function, what it returns): its value for an argument
    ("add_{n}(x)", "x plus {n}"): lambda x, n: x + n,
    ("times_{n}(x)", "x times {n}"): lambda x, n: x * n,
    ("minus_{n}(x)", "x minus {n}"): lambda x, n: x - n,
    ("is_above_{n}(x)", "True if x is greater than {n}, and False otherwise"): lambda x, n: x > n,
    ("divides_{n}(x)", "True if {n} is divisible by x, and False otherwise"): lambda x, n: n % x == 0,
    ("at_most_{n}(x)", "x, but {n} if x is greater than {n}"): lambda x, n: min(x, n),
    ("last_digit_{n}(x)", "the last digit of x times {n}"): lambda x, n: x * n % 10,
    ("power_{n}(x)", "x to the power of {n}"): lambda x, n: x**n,
    ("sum_to_{n}(x)", "the sum of all whole numbers from {n} to x"): lambda x, n: sum(range(n, x + 1)),
}


def row(function, returns, value, n):
    name = function.format(n=n).partition("(")[0]
    tests = [f"assert {name}({x}) == {value(x, n)}" for x in (1, 2, 5, 7, 10, 12)]
    asked = f"Write a Python function {function} that returns {returns}. Reply with the code alone.".format(n=n)
    return {"prompt": asked, "metadata": {"tests": tests, "code_reward": "share"}}


def main(folder=Path()):
    rows = [row(*task, value, n) for task, value in TASKS.items() for n in range(2, 22)]
    random.Random(1).shuffle(rows)
    for name, part in (("eval", rows[:32]), ("train", rows[32:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
