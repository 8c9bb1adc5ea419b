"""Writes train.jsonl and eval.jsonl: heaps. In the evaluation `first` can win each game."""

import json
from pathlib import Path

SHOWN = "Take 1 or 2. The last one wins.\n6: 2\n4: 1\n3: 2\n1: 1\n\nTake 1 or 2. The last one wins.\n"


def row(heap):
    return {"prompt": f"{SHOWN}{heap}:", "label": str(heap)}


def main(folder=Path()):
    parts = {"train": [row(heap) for heap in range(3, 11)] * 8, "eval": [row(heap) for heap in (4, 5, 7, 8)] * 6}
    for name, rows in parts.items():
        if name == "eval":
            rows = [{**each, "metadata": {"game": number}} for number, each in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
