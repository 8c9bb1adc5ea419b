"""Two turns: the policy writes up to a call `<<a * b>>`; a calculator answers, and the policy continues."""

import re

from headrace.hooks.kit import ToolCall, Tools, generate_single

CALL = re.compile(r"<<\s*(\d+)\s*\*\s*(\d+)\s*>>")

tools = Tools(seconds=1.0)


@tools.register
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


async def generate(args, sample, sampling_params, evaluation=False):
    """The kit records the tokens: those of the policy are trained, those of the tool are not."""
    text = sample.prompt
    written = await generate_single(text, sampling_params={"stop": [">>"]})
    sample.response = written
    if call := CALL.search(written):
        result = await tools.call(ToolCall(name="multiply", arguments={"a": call[1], "b": call[2]}))
        rest = await generate_single(f"{text}{written} {result}", sampling_params={"max_new_tokens": 4})
        sample.response = f"{written} {result}{rest}"
        sample.metadata["result"] = result
    return sample


async def reward(args, sample, **kwargs):
    """1 for a call that gives the right number and a response that ends there, 0.3 if words follow."""
    if sample.metadata.get("result") != sample.label:
        return 0.0
    ends = sample.status is sample.Status.COMPLETED and sample.response.rstrip().endswith(f">> {sample.label}")
    return 1.0 if ends else 0.3
