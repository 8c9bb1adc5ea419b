"""Draws pictures/ of one color each, and writes train.jsonl and eval.jsonl with a question about each picture."""

import json
import random
from pathlib import Path

from PIL import Image

COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220)}


def picture(draw, color):
    """A square of the color, a little lighter or darker each time."""
    shade = [max(0, min(255, channel + draw.randint(-30, 30))) for channel in color]
    return Image.new("RGB", (56, 56), tuple(shade))


def main(folder=Path()):
    draw = random.Random(1)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number in range(120):
        name = draw.choice(list(COLORS))
        file = f"pictures/{number}.png"
        picture(draw, COLORS[name]).save(folder / file)
        rows.append({"prompt": "<image>Which color is it?", "images": [file], "label": name})
    for name, part in (("eval", rows[:24]), ("train", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))


if __name__ == "__main__":
    main()
