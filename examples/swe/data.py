"""Writes train.jsonl and eval.jsonl: repositories of ten files with a bug in one of them, whose tests fail."""

import json
import random
from pathlib import Path

END = "<|im_end|>"
WORDS = {"plus": "+", "minus": "-", "times": "*", "divided by": "//", "modulo": "%"}
FUNCTIONS = {
    "total": "a + b",
    "change": "a - b",
    "area": "a * b",
    "share": "a // b",
    "rest": "a % b",
    "power": "a ** b",
    "largest": "max(a, b)",
    "smallest": "min(a, b)",
    "average": "(a + b) // 2",
}
BUGS = ("a + b", "a - b", "a * b", "a // b", "a % b")
CHECK = """import importlib
import sys

CASES = {cases}
for name, a, b, wanted in CASES:
    try:
        found = getattr(importlib.import_module(name), name)(a, b)
    except Exception as error:
        found = type(error).__name__
    if found != wanted:
        sys.exit(f"{{name}}.py: {{name}}({{a}}, {{b}}) is {{found}}, not {{wanted}}")
print("all tests pass")
"""


def value(expression, a, b):
    return eval(expression, {"a": a, "b": b, "max": max, "min": min})  # noqa: S307  # our own


def module(name, expression):
    """A file; the comment says what is right, and the code may be wrong."""
    wanted = " ".join({sign: word for word, sign in WORDS.items()}.get(part, part) for part in FUNCTIONS[name].split())
    return f"# {name}: {wanted}\ndef {name}(a, b):\n    return {expression}\n"


def failing(draw):
    """The files of a repository, its bug, and what its tests say."""
    name = draw.choice([each for each, body in FUNCTIONS.items() if body in BUGS])
    bug = draw.choice([each for each in BUGS if each != FUNCTIONS[name]])
    cases = [(each, draw.randint(6, 15), draw.randint(2, 5)) for each in FUNCTIONS]
    cases = [(each, a, b, value(FUNCTIONS[each], a, b)) for each, a, b in cases]
    a, b, wanted = next(case[1:] for case in cases if case[0] == name)
    if (found := value(bug, a, b)) == wanted:
        return failing(draw)
    files = {f"{each}.py": module(each, bug if each == name else body) for each, body in FUNCTIONS.items()}
    files["check.py"] = CHECK.format(cases=cases)
    return name, bug, files, f"{name}.py: {name}({a}, {b}) is {found}, not {wanted}"


def solved(draw, but):
    """A session that ends well, of another function than `but`."""
    name, bug, _, said = failing(draw)
    if name == but:
        return solved(draw, but)
    return (
        f"> python check.py\n{said}\nopen: {name}.py\n{module(name, bug)}fix: {bug} -> {FUNCTIONS[name]}\n"
        f"> python check.py\nall tests pass\n{END}\n"
    )


def main(folder=Path()):
    draw, rows = random.Random(1), {}
    while len(rows) < 800:
        name, _, files, said = failing(draw)
        shown = "".join(solved(draw, name) for _ in range(3))
        prompt = f"{shown}> python check.py\n{said}\n"
        rows[prompt] = {"prompt": prompt, "label": FUNCTIONS[name], "metadata": {"files": files}}
    written = list(rows.values())
    for part, chosen in (("eval", written[:24]), ("train", written[24:])):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chosen))


if __name__ == "__main__":
    main()
