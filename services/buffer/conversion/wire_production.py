"""Translates the counts of what producers put, for GetStats."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from services.buffer.ledger.production import Production


def production_to_proto(production: Production) -> pb.Production:
    return pb.Production(
        num_samples=production.num_samples,
        num_failed=production.num_failed,
        num_dropped=production.num_dropped,
        num_scored=production.num_scored,
        reward_sum=production.reward_sum,
        failures=[
            pb.FailureCount(
                reason=reason, num_samples=count.num_samples, example=count.example, group_id=count.group_id
            )
            for reason, count in production.failures.items()
        ],
        num_groups_returned=production.num_groups_returned,
        last_return=production.last_return,
    )
