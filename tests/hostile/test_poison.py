"""Samples that no edge let through, in the batches of a trainer of two ranks: set aside, and the run goes on.

Each kind is put in one run as it is, and in another as a sample that its producer declared FAILED: what both runs
train is the same, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of
from headrace.errors import DataLoss
from headrace.protobuf import Payload
from headrace.trajectory import pack_column
from services.buffer.ledger.group import SampleRecord
from services.buffer.store.memory import MemoryStore
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_results import weights
from tests.support.ranks.ranks import run_cases
from tests.support.ranks.trainer_cases import served

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

NUM_STEPS = 4
DAMAGED_ON_DISK = "damaged on disk"
Poison = Callable[[pb.Sample, pb.SamplePayload], object]


def _put(name: str, array: np.ndarray[Any, Any]) -> Poison:
    def poison(sample: pb.Sample, payload: pb.SamplePayload) -> None:
        next(column for column in payload.columns if column.name == name).CopyFrom(pack_column(name, array))

    return poison


def _tokens(token: int) -> Poison:
    """Of the right number."""

    def poison(sample: pb.Sample, payload: pb.SamplePayload) -> None:
        length = sample.envelope.prompt_tokens + sample.envelope.response_tokens
        _put("tokens", np.full(length, token, np.int32))(sample, payload)

    return poison


def _responses(name: str, value: float, dtype: type[np.generic]) -> Poison:
    def poison(sample: pb.Sample, payload: pb.SamplePayload) -> None:
        _put(name, np.full(sample.envelope.response_tokens, value, dtype))(sample, payload)

    return poison


POISONS: Mapping[str, Poison] = {
    "a token below zero": _tokens(-1),
    "a token beyond the vocabulary": _tokens(1_000_000),
    "log-probs of NaN": _responses("rollout_log_probs", math.nan, np.float32),
    "log-probs above zero": _responses("rollout_log_probs", 3.0, np.float32),
    "a mask of two": _responses("loss_mask", 2, np.uint8),
    "a mask of two dimensions": _put("loss_mask", np.ones((1, 4), np.uint8)),
    "tokens as floats": _put("tokens", np.ones(7, np.float32)),
    "no columns": lambda sample, payload: payload.ClearField("columns"),
    "metadata without end": lambda sample, payload: setattr(payload, "metadata_json", '{"a":' + "[" * 100_000),
    "more prompt than there is": lambda sample, payload: setattr(sample.envelope, "prompt_tokens", 10**6),
    "a reward of NaN": lambda sample, payload: setattr(sample.envelope, "reward", math.nan),
    "a reward of 1e308": lambda sample, payload: setattr(sample.envelope, "reward", 1e308),
    DAMAGED_ON_DISK: lambda sample, payload: sample.envelope.tags.update({"damaged": "yes"}),
}
WHOLE_GROUP = 5
WHOLE_STEP = 2
"""Groups and steps, counted from 0, all of whose samples are bad."""


def poison_of(group: int, index: int) -> Poison | None:
    """One of the second sample of each of the first groups, then of all of a group, then of all of a step."""
    kinds = list(POISONS.values())
    if group == WHOLE_GROUP or group // 4 == WHOLE_STEP:
        return kinds[(group + index) % len(kinds)]
    return kinds[group % len(kinds)] if index == 1 else kinds[(group + 5) % len(kinds)] if index == 3 else None


def changed(put: buffer_pb2.GroupPut, change: Callable[[pb.Sample, Poison], None]) -> buffer_pb2.GroupPut:
    group = int(put.group_id.rpartition("/")[2])
    for index, sample in enumerate(put.samples):
        if (poison := poison_of(group, index)) is not None:
            change(sample, poison)
    return put


def poisoned(sample: pb.Sample, poison: Poison) -> None:
    payload = pb.SamplePayload.FromString(sample.payload)
    poison(sample, payload)
    sample.payload = payload.SerializeToString()
    sample.envelope.digest, sample.envelope.payload_bytes = digest_of(sample.payload), len(sample.payload)


def declared_failed(sample: pb.Sample, poison: Poison) -> None:
    sample.envelope.status = pb.SAMPLE_STATUS_FAILED
    sample.envelope.failure.reason = "DECLARED"
    sample.envelope.ClearField("reward")


class DamagedStore(MemoryStore):
    """Cannot read what is tagged so."""

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        for record in records:
            if "damaged" in pb.SampleEnvelope.FromString(record.envelope).tags:
                raise DataLoss(f"sample {record.sample_id}: its record is damaged")
        return super().read_payloads(records)


@dataclass(frozen=True)
class Runs:
    folder: Path

    def rows(self, run: str, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("poison")
    make_tiny(folder / "model", "qwen3", num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        for edge in ("runtime.application.check_samples", "wire.check_envelope"):
            patch.setattr(f"services.buffer.{edge}", lambda *args: None)
        asyncio.run(_run(folder))
    return Runs(folder)


async def _run(folder: Path) -> None:
    most_may_fail = {"max_failed_share": 1.0}  # what is compared is a run of which most samples fail
    sections = {"rollout": {"num_rollout": NUM_STEPS, **most_may_fail}, "megatron": {}}
    async with AsyncExitStack() as stack:
        cases = []
        for name, change in (("poisoned", poisoned), ("failed", declared_failed)):
            context = served(
                name, folder, folder / "model", sections, lambda put, c=change: changed(put, c), DamagedStore()
            )
            cases.append(await stack.enter_async_context(context))
        await asyncio.to_thread(run_cases, folder, 2, [case for case, _ in cases], 300.0)


def test_no_poison_stops_the_run(runs: Runs) -> None:
    rows = runs.rows("poisoned", "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_every_bad_sample_is_counted_and_its_reason_written_down(runs: Runs) -> None:
    expected = [
        [index for group in range(4 * step, 4 * step + 4) for index in range(4) if poison_of(group, index)]
        for step in range(NUM_STEPS)
    ]
    rows = runs.rows("poisoned", "metrics.jsonl")
    assert [row["samples/set_aside"] for row in rows] == [float(len(bad)) for bad in expected]
    assert rows[WHOLE_STEP]["samples/set_aside"] == 16.0
    written = runs.rows("poisoned", "set_aside.jsonl")
    assert {row["reason"] for row in written} == {"INVALID_ARGUMENT", "DATA_LOSS"}
    assert len({row["sample_id"] for row in written}) == len(written)


def test_a_bad_sample_counts_as_one_that_its_producer_declared_failed(runs: Runs) -> None:
    for mine, theirs in zip(runs.rows("poisoned", "metrics.jsonl"), runs.rows("failed", "metrics.jsonl"), strict=True):
        for name in ("loss/policy", "grad_norm", "lr", "tokens", "samples/failed"):
            assert mine[name] == theirs[name], name
    poisoned, failed = (weights(runs.folder / run / "export") for run in ("poisoned", "failed"))
    assert [name for name in failed if not failed[name].equal(poisoned[name])] == []


def test_a_step_without_a_usable_sample_moves_no_weight(runs: Runs) -> None:
    row = runs.rows("poisoned", "metrics.jsonl")[WHOLE_STEP]
    assert row["updated"] == 0.0
    assert row["grad_norm"] == 0.0
    assert [row["updated"] for row in runs.rows("poisoned", "metrics.jsonl")] == [1.0, 1.0, 0.0, 1.0]
