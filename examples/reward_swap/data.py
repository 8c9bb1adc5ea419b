"""Writes train.jsonl: sums of digits."""

import json
from pathlib import Path

EXAMPLE = "2 + 2 = 4<|im_end|>\n"


def main(folder=Path()):
    rows = [{"prompt": f"{EXAMPLE}{a} + {b} =", "label": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
