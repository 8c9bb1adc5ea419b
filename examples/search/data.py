"""Writes passages.jsonl (an invented world, so nobody knows an answer by heart), train.jsonl and eval.jsonl."""

import json
import random
from pathlib import Path

END = "<|im_end|>"
RELATIONS = ("capital", "river", "queen", "dish", "harbor")
EXAMPLES = (("capital", "Ostra", "Belin"), ("river", "Nimby", "Osk"))
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnrstv" for vowel in "aeo"]


def passage(relation, country, name):
    return f"The {relation} of {country} is {name}."


def example(relation, country, name):
    return (
        f"Question: What is the {relation} of {country}?\n<search>{relation} of {country}</search>\n"
        f"<found>{passage(relation, country, name)}</found>\n<answer>{name}</answer>{END}\n"
    )


def main(folder=Path()):
    draw = random.Random(1)
    names = iter({"".join(draw.choices(SYLLABLES, k=3)).title(): None for _ in range(3000)})
    facts = [
        (relation, country, next(names)) for country in [next(names) for _ in range(120)] for relation in RELATIONS
    ]
    draw.shuffle(facts)
    shown = "".join(example(*each) for each in EXAMPLES)
    rows = [
        {"prompt": f"{shown}Question: What is the {relation} of {country}?\n", "label": name}
        for relation, country, name in facts
    ]
    passages = [{"text": passage(*fact)} for fact in facts]
    for name, part in (("passages", passages), ("eval", rows[:48]), ("train", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
