"""A scorer whose server is unreachable: its samples wait, one call at a time tries it, and nothing is a reward of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.rpc.net import free_port
from headrace.score import ScoreError, ScoreItem
from services.reward.scoring import FAILURES, CircuitBreaker
from tests.support.processes.reward_server import served_reward


def test_it_opens_after_failures_in_a_row_and_lets_one_call_try() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(FAILURES - 1):
        breaker.not_reached()
    breaker.reached()  # the count starts again
    for _ in range(FAILURES):
        assert breaker.admits()
        with breaker.call():
            breaker.not_reached()
    assert not breaker.admits()
    now[0] += 60.0
    with breaker.call():
        assert not breaker.admits()  # one tries already
        breaker.not_reached()
    assert not breaker.admits()
    now[0] += 60.0
    assert breaker.admits()
    with breaker.call():
        breaker.reached()
    assert breaker.admits()


async def test_samples_of_an_unreachable_server_may_wait_and_a_function_says_so_by_its_exception(
    tmp_path: Path,
) -> None:
    file = tmp_path / "f.py"
    file.write_text(
        "from headrace.errors import Unavailable\n"
        "def away(args, sample): raise Unavailable('the index is being built')\n"
        "def refused(args, sample): raise ConnectionRefusedError(111, 'no')\n"
    )
    nobody = f"127.0.0.1:{free_port()}"
    leaves: list[dict[str, Any]] = [
        {"custom_rm_path": f"{file}:away"},
        {"custom_rm_path": f"{file}:refused"},
        {"rm_type": "remote_rm", "rm_url": f"http://{nobody}"},
        {"rm_type": f"grpc://{nobody}", "reward_timeout_seconds": 0.2},
    ]
    for each in leaves:
        async with served_reward(**each) as client:
            for number in range(FAILURES + 1):
                item = ScoreItem(str(number), "", "", "")
                (result,) = await client.ask([item], None, deadline_seconds=60)
                assert isinstance(result, ScoreError), each
                assert (result.reason, result.retryable) == ("SCORER_UNAVAILABLE", True), each
            assert "in a row" in result.message
