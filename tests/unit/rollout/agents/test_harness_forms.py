"""What command-line harnesses send becomes branches of one rollout, each of whose sampled tokens is trained once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.dialect_clients import MessagesClient, ResponsesClient
from tests.support.harness_forms import ClaudeCodeForm, CodexForm
from tests.support.scripted_endpoint import Served, serving

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{"path":  "/a/{number}"}}}}\n</tool_call>\n'
FORMS: dict[str, Any] = {"claude_code": (ClaudeCodeForm, MessagesClient), "codex": (CodexForm, ResponsesClient)}


def says(served: Served, number: int, *names: str) -> None:
    calls = "".join(CALL.format(name=name, number=number) for name in names)
    served.script.says = f"<think>\nStep {number}.\n</think>\n\nNow {number}.\n{calls}"


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_a_harness_with_sub_agents_and_compaction_is_one_rollout(name: str, tmp_path: Path) -> None:
    form, client = FORMS[name]
    told = client(random.Random(0)).told

    async def ask(conversation: Any, body: Any) -> Any:
        response = await served.post(conversation.path, body, headers=conversation.headers)
        assert response.status_code == 200, response.text
        return told(response.content)

    async with serving(tmp_path, "qwen3") as served:
        main = form()
        main.says("read two files")
        says(served, 0)
        await ask(main, main.title())
        for number in range(1, 4):
            says(served, number, "read", "shell")
            main.hears(await ask(main, main.body()))
        helper = main.sub_agent()
        for number in range(4, 6):
            says(served, number, "read")
            helper.hears(await ask(helper, helper.body()))
        says(served, 6)
        main.hears(await ask(main, main.body()))
        main = main.compacted()
        for number in range(7, 9):
            says(served, number, "edit")
            main.hears(await ask(main, main.body()))
    branches = served.opened.record.branches()
    assert [sum(branch.loss_mask) > 0 for branch in branches] == [True] * 4  # title, sub-agent, and main two times
    trained = [
        pair
        for branch in branches
        for *pair, mask in zip(branch.response, branch.log_probs, branch.loss_mask, strict=True)
        if mask
    ]
    sampled = [
        list(pair) for _, made in served.script.generations for pair in zip(made.tokens, made.log_probs, strict=True)
    ]
    assert sorted(trained) == sorted(sampled)
