"""Writes train.jsonl and eval.jsonl: a secret word each, behind a game that was won."""

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
    games = list(dict.fromkeys((*draw.sample(WORDS, 2), draw.choice(WORDS)) for _ in range(800)))
    rows = [{"prompt": played(shown, first) + OPENING, "label": secret} for shown, first, secret in games]
    for name, part in (("eval", rows[:48]), ("train", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
