"""Writes train.jsonl: sums of digits. items.jsonl has responses for `headrace conformance`."""

import json
from pathlib import Path

EXAMPLE = "2 + 2 = 4<|im_end|>\n"


def main(folder=Path()):
    rows = [{"prompt": f"{EXAMPLE}{a} + {b} =", "label": str(a + b)} for a in range(10) for b in range(10)]
    items = [{**row, "response": response} for row, response in zip(rows, (" 0", "7", " two", ""), strict=False)]
    for name, lines in (("train", rows), ("items", items)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


if __name__ == "__main__":
    main()
