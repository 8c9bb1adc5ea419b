"""Light facts of samples, as the ledger's envelopes give them."""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.plan.batch import SampleFacts


def facts(
    sample_id: str,
    group_id: str = "g",
    reward: float | None = 0.0,
    status: str = "completed",
    trained_tokens: int = 1,
    rollout_id: str | None = None,
    role: str = "",
) -> SampleFacts:
    """One sample; its own rollout unless said."""
    return SampleFacts(
        sample_id=sample_id,
        group_id=group_id,
        rollout_id=sample_id if rollout_id is None else rollout_id,
        reward=reward,
        status=status,
        prompt_length=3,
        response_length=max(trained_tokens, 1),
        trained_tokens=trained_tokens,
        min_policy_version=0,
        role=role,
    )


def group(group_id: str, rewards: Sequence[float | None]) -> list[SampleFacts]:
    """Names as `group_id/0`, `group_id/1`."""
    return [facts(f"{group_id}/{i}", group_id, reward) for i, reward in enumerate(rewards)]
