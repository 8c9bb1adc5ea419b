"""The tensors that every publication of a run sends, and the addresses where its groups listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb
from services.trainer.control.messages import StageGroup, StageWeights


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """The tensors of all stages, and which buckets each stage sends; the same throughout the run."""

    manifest: pb.Manifest
    buckets_of_stages: Sequence[range]

    @classmethod
    def of(cls, stages: Sequence[StageWeights]) -> PublicationPlan:
        """Buckets are numbered through all stages, in the stages' order."""
        tensors: list[pb.TensorSpec] = []
        buckets_of_stages = []
        first = 0
        for stage in stages:
            buckets_of_stages.append(range(first, first + len(stage.buckets)))
            first += len(stage.buckets)
            for number, bucket in zip(buckets_of_stages[-1], stage.buckets, strict=True):
                tensors += [spec.pack(number) for spec in bucket]
        return cls(pb.Manifest(tensors=tensors), buckets_of_stages)

    @staticmethod
    def in_one_bucket(stages: Sequence[StageWeights]) -> pb.Manifest:
        """The tensors of all stages in bucket 0, as engines get them that load them from one folder."""
        return pb.Manifest(tensors=[spec.pack(0) for stage in stages for bucket in stage.buckets for spec in bucket])

    @property
    def num_buckets(self) -> int:
        """The number of buckets of all stages together."""
        return sum(map(len, self.buckets_of_stages))

    def groups(self, opened: Sequence[StageGroup]) -> list[pb.PublishGroup]:
        """The groups with the buckets that travel in them; `opened` has one group a stage, in the stages' order."""
        return [
            pb.PublishGroup(
                name=group.name,
                master_address=group.host,
                master_port=group.port,
                buckets=buckets,
                joined=group.joined,
            )
            for buckets, group in zip(self.buckets_of_stages, opened, strict=True)
        ]
