"""Writes train.jsonl and eval.jsonl: every word of the game as the secret one, behind a game that was played well."""

import json
import random
from pathlib import Path

from game import WORDS, marks

OPENING = f"Guess the animal: {' '.join(WORDS)}.\nGuess:"


def played(secret, *guesses):
    """The text of a game that was won."""
    turns = "".join(f" {guess}\nMarks: {marks(guess, secret)}\nGuess:" for guess in guesses)
    return f"{OPENING}{turns} {secret}\n\n"


def main(folder=Path()):
    draw = random.Random(1)
    rows = []
    for _ in range(40):
        for secret in WORDS:
            shown, first = draw.sample([word for word in WORDS if word != secret], 2)
            rows.append({"prompt": played(shown, first) + OPENING, "label": secret})
    for name, part in (("eval", rows[:64]), ("train", rows[64:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
