"""A calculator that the policy learns to use: what it writes between << and >> is computed, and put in its answer.

headrace train examples/tools/job.toml, after `python examples/tools/calculator.py`, which writes the prompts.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from headrace.hooks.kit import ToolCall, Tools, generate_single

FOLDER = Path("models/calculator")
EXAMPLE = "12 * 34 = <<12 * 34>> 408<|im_end|>\n"
"""One worked product shows the notation. A model of this size cannot multiply such numbers by itself."""
RIGHT_AND_MORE = 0.3
CALLED = re.compile(r"<<\s*(\d+)\s*\*\s*(\d+)\s*>>")

tools = Tools(seconds=1.0)


@tools.register
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


async def generate(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """Two turns at most: up to a call, and from its result on."""
    text = sample.prompt
    said = await generate_single(text, sampling_params={"stop": [">>"]})
    sample.response = said
    if call := CALLED.search(said):
        result = await tools.call(ToolCall(name="multiply", arguments={"a": call[1], "b": call[2]}))
        sample.response = await generate_single(f"{text}{said} {result}", sampling_params={"max_new_tokens": 4})
        sample.metadata["result"] = result
    return sample


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 for a call that gives the right number and no word behind it, 0.3 where words follow."""
    if sample.metadata.get("result") != sample.label:
        return 0.0
    is_bare = sample.status is sample.Status.COMPLETED and not sample.response.strip()
    return 1.0 if is_bare else RIGHT_AND_MORE


def main() -> None:
    """Writes train.jsonl and eval.jsonl; no product of the second is in the first."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    random.Random(1).shuffle(pairs)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, some in (("eval", pairs[:48]), ("train", pairs[48:])):
        rows = [{"prompt": f"{EXAMPLE}{a} * {b} =", "label": str(a * b)} for a, b in some]
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
