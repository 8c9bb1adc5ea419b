"""The real Codex CLI plays a task in a session, by its command line, without a network but the loopback.

`make examples` installs it from npm, names it in HEADRACE_CODEX, and runs this in a network namespace of its own.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.hooks.agent import Task
from headrace.hooks.agent_command import played
from tests.support.scripted_endpoint import serving

CODEX = os.environ.get("HEADRACE_CODEX")
PROVIDER = '{name="headrace", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
COMMAND = (
    f"{CODEX} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy "
    f"-c model_provider=headrace -c 'model_providers.headrace={PROVIDER}' {{prompt}}"
)
STEPS = [
    "<think>\nI write it.\n</think>\n\nWriting.\n"
    '<tool_call>\n{"name": "exec_command",  "arguments": {"cmd": "echo 42 > answer.txt"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo é > other.txt"}}\n</tool_call>',
    "<think>\nI look.\n</think>\n\n"
    '<tool_call>\n{"arguments": {"cmd": "cat answer.txt"}, "name": "exec_command"}\n</tool_call>',
    "It is in answer.txt.",
]


@pytest.mark.skipif(CODEX is None, reason="long: make examples sets HEADRACE_CODEX")
async def test_codex_works_in_its_folder_and_all_that_the_policy_said_is_one_sample(tmp_path: Path) -> None:
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    async with serving(tmp_path, "qwen3") as served:
        served.script.says = lambda prompt: STEPS[min(len(served.script.generations), len(STEPS) - 1)]
        async with played(COMMAND, Task("Write 42 into answer.txt."), f"{served.url}/v1") as left:
            assert (left.folder / "answer.txt").read_text() == "42\n"
            assert "It is in answer.txt." in left.output_file.read_text()
    (branch,) = served.opened.record.branches()
    generations = [made for _, made in served.script.generations]
    trained = [token for token, mask in zip(branch.response, branch.loss_mask, strict=True) if mask]
    assert trained == [token for made in generations for token in made.tokens]
    assert len(generations) == len(STEPS)
