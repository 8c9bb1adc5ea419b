"""Writes two data sets: sums.jsonl, and opposites.jsonl with questions in one word."""

import json
from pathlib import Path

OPPOSITES = (
    "hot cold, up down, big small, fast slow, open closed, young old, early late, full empty, wet dry, rich poor"
)


def main(folder=Path()):
    sums = [{"prompt": f"2 + 2 = 4<|im_end|>\n{a} + {b} =", "label": str(a + b)} for a in range(6) for b in range(6)]
    pairs = [pair.split() for pair in OPPOSITES.split(", ")]
    words = [{"prompt": f"The opposite of left is right. The opposite of {a} is", "label": b} for a, b in pairs]
    for name, rows in (("sums", sums), ("opposites", words)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
