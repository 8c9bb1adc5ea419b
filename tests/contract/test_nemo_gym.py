"""Resource servers of NeMo Gym score samples. They run by a Python of their own, with rows of NeMo Gym's package.

`make examples` sets that Python up and names it in HEADRACE_NEMO_GYM_PYTHON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from tests.support.processes.reward_server import served_reward

PYTHON = os.environ.get("HEADRACE_NEMO_GYM_PYTHON", "")
SERVER = Path(__file__).parents[1] / "support" / "processes" / "nemo_gym_server.py"
WAIT_SECONDS = 120.0

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs NeMo Gym in a Python 3.12 of its own: make examples sets HEADRACE_NEMO_GYM_PYTHON"
)


@contextmanager
def resource_server(name: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        process = subprocess.Popen([PYTHON, str(SERVER), name, str(descriptor)], pass_fds=[descriptor])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def first_row(server: str) -> dict[str, Any]:
    find = f"import resources_servers.{server} as server; print(*server.__path__)"
    folder = subprocess.run([PYTHON, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    with (Path(folder) / "data" / "example.jsonl").open() as rows:
        row: dict[str, Any] = json.loads(rows.readline())
    return row


async def scored(url: str, *samples: tuple[str, Mapping[str, Any], Sequence[Any]]) -> Sequence[ScoreResult]:
    """Of responses, rows and turns."""
    items = [
        ScoreItem(str(i), "", response, None, row, hook_fields={"turns": turns} if turns else {})
        for i, (response, row, turns) in enumerate(samples)
    ]
    async with served_reward(rm_type="nemo_gym", rm_url=url, reward_timeout_seconds=WAIT_SECONDS) as client:
        return await client.score(items, deadline_seconds=WAIT_SECONDS)


async def test_an_answer_is_scored_without_its_thoughts_and_a_wrong_row_fails_its_sample() -> None:
    row = first_row("mcqa")
    right, wrong = (f"<think>\\boxed{{{thought}}}</think>\\boxed{{{answer}}}" for thought, answer in ("AB", "BA"))
    assert row["expected_answer"] == "B"
    with resource_server("mcqa") as url:
        good, bad, refused = await scored(url, (right, row, ()), (wrong, row, ()), (right, {**row, "options": 5}, ()))
    assert isinstance(good, Score)
    assert isinstance(bad, Score)
    assert (good.value, bad.value) == (1.0, 0.0)
    assert isinstance(refused, ScoreError)
    assert "422" in refused.message


async def test_the_session_that_was_seeded_is_the_one_that_is_verified() -> None:
    row = first_row("example_session_state_mgmt")
    with resource_server("example_session_state_mgmt") as url:
        results = await scored(url, *(("done", {**row, "expected_count": count}, ()) for count in (3, 6)))
    assert row["initial_count"] == 3
    assert [result.value for result in results if isinstance(result, Score)] == [1.0, 0.0]


async def test_function_calls_of_a_conversation_are_scored() -> None:
    row = first_row("workplace_assistant")
    (call,) = row["ground_truth"]
    begun = [{"role": "user", "content": "Reply to Carlos."}]
    called = [{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": call}]}]
    done = [{"role": "tool", "tool_call_id": "c1", "content": "sent"}, {"role": "assistant", "content": "Done."}]
    with resource_server("workplace_assistant") as url:
        good, bad = await scored(url, ("Done.", row, begun + called + done), ("Done.", row, begun + done[1:]))
    assert isinstance(good, Score)
    assert isinstance(bad, Score)
    assert (good.value, bad.value) == (1.0, 0.0)
