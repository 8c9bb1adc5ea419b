"""ReTool: the policy writes <code>, the sandbox runs it, its output is appended, and the policy goes on."""

import re

from headrace.hooks.kit import generate_single, run_python


async def generate(args, sample, sampling_params, evaluation=False):
    """Outputs go into the context and are not trained. At most --max-turns responses."""
    text, outputs = sample.prompt, []
    for _ in range(args.max_turns):
        sample.response = await generate_single(text, sampling_params={"stop": ["</code>"]})
        program = re.search(r"<code>(.*?)</code>", sample.response, re.DOTALL)
        if program is None:
            break
        result = await run_python(program[1], seconds=2.0, max_characters=200)  # no network, an empty /tmp
        outputs.append(result.output.strip())
        text += f"{sample.response}\n<output>{outputs[-1]}</output>\n"
    sample.metadata["outputs"] = outputs
    return sample


async def reward(args, sample, **kwargs):
    """1 for the right answer, 0.2 for a program that printed it, 0.1 for one that printed another number."""
    answer = re.search(r"answer is (-?\d+)", sample.response)
    if answer and answer[1] == sample.label:
        return 1.0
    outputs = sample.metadata.get("outputs", [])
    return 0.2 if sample.label in outputs else 0.1 if any(re.fullmatch(r"-?\d+", each) for each in outputs) else 0.0
