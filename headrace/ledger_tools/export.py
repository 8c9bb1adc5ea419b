"""A stream's samples as a Parquet file: one row a sample, arrays as lists.

Samples of committed groups have their envelope still and their payload no more: their text comes from the run's sample
log, and their arrays are null. Samples that the ledger has forgotten, or never took because they failed, follow with
what the log knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.open import Buffer, open_buffer
from headrace.errors import FailedPrecondition, NotFound
from headrace.limits import to_json
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample, Status

_GROUPS_AT_ONCE = 100
_SAMPLES_AT_ONCE = 64
_LOGGED_AT_ONCE = 1_000
_STEPS_AT_ONCE = 4
_LOGGED_STREAM = "train"
_SAME = (
    *("sample_id", "group_id", "index", "rollout_id", "status", "reward", "scorer", "scorer_version"),
    *("failure_reason", "failure_message", "prompt_tokens", "response_tokens", "trained_tokens"),
)
"""Columns that the log has as they are."""
_WITH_PAYLOAD = frozenset({pb.GROUP_STATE_READY, pb.GROUP_STATE_CONSUMED})


async def export_parquet(address: str, stream: str, file: Path, log: SampleLog | None = None) -> int:
    """Returns the number of samples written. Raises FailedPrecondition without pyarrow.

    `log` is the run's, for its `train` stream.
    """
    arrow = _arrow()
    schema, num_rows = _schema(arrow), 0
    from pyarrow.parquet import ParquetWriter

    logged = _Logged(log if log and stream == _LOGGED_STREAM else None)
    async with open_buffer(address) as buffer:
        await buffer.stats(stream)
        with ParquetWriter(file, schema, compression="zstd") as writer:
            seen = set[str]()
            async for page in pages(buffer, stream, _GROUPS_AT_ONCE):
                groups = [group for group in page if group.samples and group.group_id not in seen]
                seen.update(group.group_id for group in page)
                rows = [row async for row in _rows(buffer, stream, groups, logged)]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                num_rows += len(rows)
            for rows in logged.others():
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                num_rows += len(rows)
    return num_rows


class _Logged:
    """The run's sample log beside the ledger's pages."""

    def __init__(self, log: SampleLog | None) -> None:
        self._log = log
        self._rows = set[str]()
        self._steps: dict[int, dict[str, Answer]] = {}

    def text_of(self, group: pb.Group, sample_id: str) -> dict[str, Any]:
        """Columns that a committed sample's payload had; empty where nobody wrote them down."""
        if self._log is None or not group.HasField("step"):
            return {}
        answer = self._of_step(self._log, group.step + 1).get(sample_id)
        return _text(answer) if answer else {}

    def exported(self, sample_id: str) -> None:
        self._rows.add(sample_id)

    def others(self) -> Iterator[list[dict[str, Any]]]:
        """Rows of samples that no page had, step by step."""
        if self._log is None:
            return
        sources = [self._log.of_step(step) for step in self._log.steps()]
        for answers in (*sources, self._log.failed()):
            while some := list(islice(answers, _LOGGED_AT_ONCE)):
                yield [_logged_row(one) for one in some if one.sample_id not in self._rows]

    def _of_step(self, log: SampleLog, step: int) -> dict[str, Answer]:
        """Pages go by last change, so the steps of a page are few and near each other."""
        if step not in self._steps:
            if len(self._steps) >= _STEPS_AT_ONCE:
                del self._steps[next(iter(self._steps))]
            self._steps[step] = {answer.sample_id: answer for answer in log.of_step(step)}
        return self._steps[step]


async def pages(
    buffer: Buffer, stream: str, page_size: int, states: Sequence[pb.GroupState.ValueType] = ()
) -> AsyncIterator[Sequence[pb.Group]]:
    """Yields a stream's groups. One that changes meanwhile moves to the front, behind what is read already."""
    token = ""
    while True:
        page = await buffer.list_groups(stream, states, page_size=page_size, page_token=token)
        yield page.groups
        token = page.next_page_token
        if not token:
            return


async def _rows(
    buffer: Buffer, stream: str, groups: Sequence[pb.Group], logged: _Logged
) -> AsyncIterator[dict[str, Any]]:
    """Yields rows in the order of the page."""
    owners = {sample.sample_id: group for group in groups for sample in group.samples}
    envelopes = iter([sample for group in groups for sample in group.samples])
    while some := list(islice(envelopes, _SAMPLES_AT_ONCE)):
        held = [e.sample_id for e in some if owners[e.sample_id].state in _WITH_PAYLOAD]
        opened = {sample.sample_id: sample for sample in await _fetch(buffer, stream, held)}
        for envelope in some:
            group, sample = owners[envelope.sample_id], opened.get(envelope.sample_id)
            yield _row(group, envelope) | (_payload(sample) if sample else logged.text_of(group, envelope.sample_id))
            logged.exported(envelope.sample_id)


async def _fetch(buffer: Buffer, stream: str, sample_ids: Sequence[str]) -> list[Sample]:
    """Returns the samples that are still there: a step may be committed while its samples are read."""
    if not sample_ids:
        return []
    try:
        return [Sample.unpack(packed) for packed in await buffer.fetch_samples(stream, sample_ids)]
    except NotFound:
        if len(sample_ids) == 1:
            return []
    half = len(sample_ids) // 2
    return await _fetch(buffer, stream, sample_ids[:half]) + await _fetch(buffer, stream, sample_ids[half:])


def _row(group: pb.Group, envelope: sample_pb2.SampleEnvelope) -> dict[str, Any]:
    return {
        "sample_id": envelope.sample_id,
        "group_id": group.group_id,
        "index": envelope.index,
        "rollout_id": envelope.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "state": pb.GroupState.Name(group.state).removeprefix("GROUP_STATE_"),
        "step": group.step if group.HasField("step") else None,
        "status": Status.of(envelope.status).value,
        "reward": envelope.reward if envelope.HasField("reward") else None,
        "reward_parts": list(envelope.reward_parts.items()),
        "scorer": envelope.scorer,
        "scorer_version": envelope.scorer_version,
        "failure_reason": envelope.failure.reason if envelope.HasField("failure") else None,
        "failure_message": envelope.failure.message if envelope.HasField("failure") else None,
        "prompt_tokens": envelope.prompt_tokens,
        "response_tokens": envelope.response_tokens,
        "trained_tokens": envelope.trained_tokens,
        "policy_ranges": [
            {"policy_version": r.policy_version, "start": r.start, "end": r.end} for r in envelope.policy_ranges
        ],
        "tags": list(envelope.tags.items()),
    }


def _logged_row(answer: Answer) -> dict[str, Any]:
    """Steps are the ledger's here, from 0."""
    trained = {} if answer.step is None else {"state": "COMMITTED", "step": answer.step - 1}
    ranges = [dict(zip(("policy_version", "start", "end"), each, strict=True)) for each in answer.policy_ranges]
    same = {name: getattr(answer, name) for name in _SAME}
    parts = list(answer.reward_parts.items())
    return {**same, "reward_parts": parts, "policy_ranges": ranges, **trained, **_text(answer)}


def _text(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in ("prompt", "response", "label", "metadata")}


def _payload(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": to_json(sample.metadata),
        "sampling_params": to_json(sample.sampling_params),
        "train_metadata": to_json(sample.train_metadata),
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "rollout_log_probs": sample.rollout_log_probs,
        "columns": [
            (name, {"dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes()})
            for name, array in sample.columns.items()
        ],
    }


def _schema(arrow: ModuleType) -> Any:
    text, whole = arrow.string(), arrow.int64()
    array = arrow.struct({"dtype": text, "shape": arrow.list_(whole), "data": arrow.binary()})
    version_range = arrow.struct({"policy_version": whole, "start": whole, "end": whole})
    kinds = {
        **dict.fromkeys(("sample_id", "group_id"), text), "index": whole,
        **dict.fromkeys(("rollout_id", "prompt_id", "state"), text), "step": whole, "status": text,
        "reward": arrow.float64(), "reward_parts": arrow.map_(text, arrow.float64()),
        **dict.fromkeys(("scorer", "scorer_version", "failure_reason", "failure_message"), text),
        **dict.fromkeys(("prompt_tokens", "response_tokens", "trained_tokens"), whole),
        "policy_ranges": arrow.list_(version_range), "tags": arrow.map_(text, text),
        **dict.fromkeys(("prompt", "response", "label", "metadata", "sampling_params", "train_metadata"), text),
        "tokens": arrow.list_(arrow.int32()), "loss_mask": arrow.list_(arrow.uint8()),
        "rollout_log_probs": arrow.list_(arrow.float32()), "columns": arrow.map_(text, array),
    }  # fmt: skip
    return arrow.schema(list(kinds.items()))


def _arrow() -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise FailedPrecondition("Parquet needs pyarrow: pip install 'headrace[parquet]'") from error
    module: ModuleType = pyarrow
    return module
