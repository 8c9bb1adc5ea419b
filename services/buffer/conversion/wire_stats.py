"""Translates a stream's counts for GetStats."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from services.buffer.ledger.group import GroupState
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.production import Production
from services.buffer.ledger.source import source_names


def stats_to_proto(stream: IndexedStream) -> pb.StreamStats:
    """Returns all but `trouble`, which the prompt files know."""
    state = stream.state
    return pb.StreamStats(
        stream=state.name,
        groups={group_state.name: stream.count(group_state) for group_state in GroupState},
        payload_bytes=stream.payload_bytes,
        stored_bytes=stream.stored_bytes,
        epoch=state.epoch,
        step=state.step,
        committed_step=state.committed_step,
        policy_version=state.policy_version,
        admissible_groups=stream.places_left(),
        prompts_read=state.prompts_read,
        data_epoch=state.data_epoch,
        bad_lines=state.num_bad_lines,
        forgotten_step=state.forgotten_step,
        sources=_sources(stream) if len(state.config.files) > 1 else (),
        production=_production_to_proto(stream.production),
    )


def _sources(stream: IndexedStream) -> list[pb.SourceStats]:
    state, found = stream.state, []
    names = source_names(state.config.files)
    for i, (name, file, cursor) in enumerate(zip(names, state.config.files, state.cursors, strict=True)):
        queued, leased, ready = stream.queues.counts(i)
        found.append(
            pb.SourceStats(
                name=name,
                weight=file.weight,
                prompts_read=cursor.prompts_read,
                data_epoch=cursor.epoch,
                ended=state.has_ended(i),
                queued=queued,
                leased=leased,
                ready=ready,
                batched=state.taken_of(i),
            )
        )
    return found


def _production_to_proto(production: Production) -> pb.Production:
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
        filtered=[
            pb.FilteredCount(reason=reason, equal_reward=reward, num_samples=number)
            for reason, reward, number in production.filtered
        ],
        lowest_reward=production.lowest_reward,
        highest_reward=production.highest_reward,
    )
