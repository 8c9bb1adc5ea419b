"""What a publication announces: every tensor once, in buckets that are numbered through the stages."""

from __future__ import annotations

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.publication import TensorSpec
from services.trainer.control.senders import StageGroup, StageWeights
from services.trainer.control.transport import PublicationPlan

A, B, C = (TensorSpec(name, (2, 3), "bfloat16") for name in "abc")


def test_buckets_are_numbered_through_all_stages() -> None:
    plan = PublicationPlan.of([StageWeights(0, [[A], [B]]), StageWeights(1, [[C]])])
    assert plan.num_buckets == 3
    assert plan.manifest == pb.Manifest(
        tensors=[
            pb.TensorSpec(name=name, shape=(2, 3), dtype="bfloat16", bucket=number) for number, name in enumerate("abc")
        ]
    )
    opened = [StageGroup(1, "g1", "host", 1001, True), StageGroup(0, "g0", "host", 1000, False)]
    assert plan.groups(opened) == [
        pb.PublishGroup(name="g0", master_address="host", master_port=1000, buckets=(0, 1), joined=False),
        pb.PublishGroup(name="g1", master_address="host", master_port=1001, buckets=(2,), joined=True),
    ]
