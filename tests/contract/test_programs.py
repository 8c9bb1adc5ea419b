"""Programs in responses, scored by the reward service."""

from __future__ import annotations

from dataclasses import replace

from tests.contract.reward.test_reward_service import items, serving, values


async def test_programs_are_scored_beside_each_other_and_tests_that_nobody_can_read_are_no_reward() -> None:
    programs = ["```python\nprint(int(input()) + 1)\n```", "```python\nwhile True: pass\n```", "no program"]
    asked = items(*programs, tests={"inputs": ["6"], "outputs": ["7"]}, time_limit=1) + items("8", tests="odd")
    async with serving(rm_type="code") as client:
        judged = await client.score([replace(a, item_id=str(i)) for i, a in enumerate(asked)], deadline_seconds=120)
    assert values(judged) == [1.0, 0.0, 0.0, "SCORER_RAISED"]
