"""Samples that came with their prompt: they get their ids when the ledger knows their group's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.wire.put_request import RawSample
from services.buffer.conversion.wire import distinct, to_finished
from services.buffer.ledger.commands.work import NewSample
from services.buffer.ledger.group import payload_key

_REUSED_FROM = "reused_from"


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The samples of one group, as its data source gave them."""

    samples: tuple[sample_pb2.Sample, ...]
    needs_reward: bool

    @classmethod
    def parse(cls, packed: Sequence[bytes], n_samples: int, prompt_id: str, *, needs_reward: bool) -> FinishedGroup:
        """Raises InvalidArgument for a group of fewer than `n_samples`."""
        if len(packed) < n_samples:
            raise InvalidArgument(
                f"the data source brought {len(packed)} finished samples for {prompt_id}, n_samples_per_prompt is "
                f"{n_samples}: return them as one list, or with one group_index"
            )
        return cls(tuple(sample_pb2.Sample.FromString(data) for data in packed), needs_reward)

    def named(self, group_id: str, lease_id: str) -> tuple[NewSample, ...]:
        """Returns the samples as a producer would put them. Raises InvalidArgument for what cannot be put."""
        rollouts: dict[str, str] = {}
        new: list[NewSample] = []
        for place, sample in enumerate(self.samples):
            envelope = sample_pb2.SampleEnvelope()
            envelope.CopyFrom(sample.envelope)
            if envelope.tags or envelope.sample_id:
                envelope.tags[_REUSED_FROM] = envelope.sample_id
            envelope.sample_id, envelope.group_id = f"{group_id}/again/{place}", group_id
            envelope.rollout_id = rollouts.setdefault(sample.envelope.rollout_id, envelope.sample_id)
            raw = RawSample(envelope.SerializeToString(deterministic=True), sample.payload)
            key = payload_key(lease_id, place)
            new.append(to_finished(raw, group_id, key, needs_reward=self.needs_reward))
        return distinct(new)
