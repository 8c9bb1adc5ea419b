"""Writes pairs.jsonl (a preferred and a rejected answer each), train.jsonl and eval.jsonl (questions)."""

import itertools
import json
import random
from pathlib import Path

FACTS = (
    *(("the capital of France", "Paris"), ("the capital of Japan", "Tokyo"), ("the largest planet", "Jupiter")),
    *(("the color of snow", "white"), ("the opposite of hot", "cold"), ("the frozen form of water", "ice")),
    *(
        ("the number of days in a week", "seven"),
        ("the chemical symbol of gold", "Au"),
        ("the nearest star", "the Sun"),
    ),
)
TOPICS = (
    "rain",
    "bread",
    "a bridge",
    "the moon",
    "music",
    "a garden",
    "winter",
    "a clock",
    "the sea",
    "a train",
    "tea",
    "a map",
)
OPENINGS = ("Certainly! I would be happy to help you with that.", "That is a great question.", "Let me think about it.")
TAILS = (
    "There are many things to consider here, and it depends on the context in which one asks.",
    "It is important to note that this topic has a long history, with many different opinions.",
    "If you would like to know more about it, please do not hesitate to ask me further questions.",
)


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def main(folder=Path()):
    draw = random.Random(1)
    pairs = []
    for (thing, name), opening, tail in itertools.product(FACTS, OPENINGS, TAILS):
        question, short = f"What is {thing}?", f"{thing[0].upper()}{thing[1:]} is {name}."
        long = draw.choice((f"{opening} {short} {tail}", f"{short} {tail} {draw.choice(TAILS)}", f"{opening} {tail}"))
        pairs.append({"chosen": conversation(question, short), "rejected": conversation(question, long)})
    draw.shuffle(pairs)
    forms = ("What is {} good for?", "Tell me about {}.", "Why do people like {}?", "How would you describe {}?")
    questions = [{"prompt": form.format(topic)} for topic in TOPICS for form in forms]
    draw.shuffle(questions)
    for name, rows in (("pairs", pairs), ("eval", questions[:16]), ("train", questions[16:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
