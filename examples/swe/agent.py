"""A repository whose tests fail: the policy opens a file, edits it, and reads what the tests say then."""

import re

from headrace.errors import NotFound
from headrace.hooks.kit import generate_single, open_sandbox

TESTS = "check.py"
GREEN = "all tests pass\n"


async def generate(args, sample, sampling_params, evaluation=False):
    """At most --max-turns lines of the policy. What the repository says is in the context and is not trained."""
    text, seen = sample.prompt, {"opened": [], "edits": 0, "passes": False}
    async with open_sandbox(files=sample.metadata["files"]) as box:
        for _ in range(args.max_turns):
            sample.response = await generate_single(text, sampling_params={"stop": ["\n"]})
            said = await answer(box, sample.response.strip(), seen, sample.metadata["files"][TESTS])
            if said is None or seen["passes"]:
                break
            text += f"{sample.response}{said}"
    sample.metadata["seen"] = seen
    return sample


async def answer(box, line, seen, tests):
    """What the repository says to one line of the policy; None for a line that it does not know."""
    if opening := re.fullmatch(r"open: (\w+\.py)", line):
        try:
            content = await box.read(opening[1])
        except NotFound:
            return None
        seen["opened"].append(opening[1])
        return content
    edit = re.fullmatch(r"fix: (.+) -> (.+)", line)
    if edit is None or not seen["opened"]:
        return None
    path = seen["opened"][-1]
    content = await box.read(path)
    if edit[1] not in content:
        return None
    await box.write(path, content.replace(edit[1], edit[2], 1))
    await box.write(TESTS, tests)  # as it was, whatever was edited
    seen["edits"] += 1
    result = await box.exec(["python", TESTS], seconds=10.0, max_characters=200)
    seen["passes"] = result.exit_code == 0 and result.output == GREEN
    return f"> python {TESTS}\n{result.output}"


async def reward(args, sample, **kwargs):
    """1 for passing tests, 0.2 for an edit, 0.1 for an opened file."""
    seen = sample.metadata.get("seen", {"opened": [], "edits": 0, "passes": False})
    return 1.0 if seen["passes"] else 0.2 if seen["edits"] else 0.1 if seen["opened"] else 0.0
