"""What PutGroups lets in is what a trainer reads: both judge the same bytes alike, and columns are not copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
import pytest

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of
from headrace.errors import InvalidArgument
from headrace.trajectory import (
    COLUMN_DTYPES,
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    TOKENS,
    PolicyRange,
    Sample,
    Status,
    pack_column,
    unpack_column,
)
from services.buffer.payload import check_samples, columns_of
from tests.unit.test_sample_checks import BAD_ENVELOPES, BAD_PAYLOADS, packed


def large(**changes: object) -> pb.Sample:
    """Beyond what is parsed: its payload is walked."""
    tokens = np.arange(9_000, dtype=np.int32)
    fields: dict[str, object] = {
        "tokens": tokens,
        "loss_mask": np.ones(8_000, np.uint8),
        "rollout_log_probs": np.full(8_000, -0.5, np.float32),
        "policy_ranges": (PolicyRange(0, 0, 8_000),),
        "columns": {"teacher_log_probs": np.full(8_000, -1.0, np.float32)},
    }
    sample = Sample("s", "g", 0, "prompt", "response", status=Status.COMPLETED, **(fields | changes))  # type: ignore[arg-type]
    return sample.pack()


def check(sample: pb.Sample, vocab_size: int | None = None) -> None:
    check_samples([(sample.envelope, memoryview(sample.payload))], vocab_size)


def named(sample: pb.Sample, name: str) -> tuple[pb.SampleEnvelope, memoryview]:
    sample.envelope.sample_id = name
    return sample.envelope, memoryview(sample.payload)


@pytest.mark.parametrize(
    ("column", "value"), [("tokens", -1), ("loss_mask", 2), ("rollout_log_probs", 0.5), ("teacher_log_probs", -1e5)]
)
@pytest.mark.parametrize("make", [packed, large])
def test_a_bad_value_is_found_among_many_samples_and_its_sample_is_named(
    make: Callable[[], pb.Sample], column: str, value: float
) -> None:
    def change(payload: pb.SamplePayload) -> None:
        if column == "teacher_log_probs" and make is packed:
            payload.columns.add().CopyFrom(payload.columns[2])
            payload.columns[3].name = column
        found = next(one for one in payload.columns if one.name == column)
        values = unpack_column(found).copy()
        values[1] = value
        found.CopyFrom(pack_column(column, values))

    samples = [named(make(), f"good-{i}") for i in range(20)]
    check_samples(samples)
    bad = named(_changed(make(), change), "bad")
    bad[0].trained_tokens += column == "loss_mask" and make is packed
    with pytest.raises(InvalidArgument, match=rf"^sample bad: {column}\[1\]"):
        check_samples([*samples[:7], bad, *samples[7:]])


def test_a_payload_that_is_walked_has_the_columns_that_its_class_reads() -> None:
    arrays: list[np.ndarray] = [np.zeros((3, 40_000), np.float64), np.zeros(0, np.int64), np.zeros((0, 3), np.uint8)]
    columns = [pack_column(f"column {i}", array) for i, array in enumerate(arrays)]
    payload = pb.SamplePayload(
        prompt="ü" * 200, metadata_json="{}", columns=columns, label="", train_metadata_json="{}"
    )
    data = payload.SerializeToString()
    view = memoryview(data)
    found = columns_of("s", view)
    assert [(name, dtype, shape, bytes(part)) for name, dtype, shape, part in found] == [
        (c.name, c.dtype, tuple(c.shape), c.data) for c in columns
    ]
    assert all(isinstance(part, memoryview) for *_, part in found)
    assert found[0][3].obj is data  # type: ignore[union-attr]  # a slice, not a copy


@pytest.mark.parametrize("order", permutations(range(3)), ids=str)
@pytest.mark.parametrize("length", [0, 1, 40, 9_000])
def test_rows_are_read_as_the_class_reads_them(order: Sequence[int], length: int) -> None:
    names = [TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS]
    columns = [pack_column(names[i], np.arange(length).astype(COLUMN_DTYPES[names[i]])) for i in order]
    data = pb.SamplePayload(prompt="ü", columns=columns).SerializeToString()
    assert [(name, dtype, shape, bytes(part)) for name, dtype, shape, part in columns_of("s", memoryview(data))] == [
        (c.name, c.dtype, tuple(c.shape), c.data) for c in columns
    ]
    with pytest.raises(InvalidArgument, match="does not parse"):
        columns_of("s", data[:-1])


@pytest.mark.parametrize("change", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_what_no_trainer_reads_is_not_kept(change: Callable[[pb.SamplePayload], object]) -> None:
    for whole in (packed(change_payload=change), _changed(large(), change)):
        with pytest.raises(InvalidArgument, match="sample s"):
            check(whole)


def _changed(sample: pb.Sample, change: Callable[[pb.SamplePayload], object]) -> pb.Sample:
    payload = pb.SamplePayload.FromString(sample.payload)
    change(payload)
    sample.payload = payload.SerializeToString()
    return sample


@pytest.mark.parametrize("change", BAD_ENVELOPES.values(), ids=BAD_ENVELOPES)
def test_an_envelope_that_contradicts_its_payload_is_not_kept(change: Callable[[pb.SampleEnvelope], object]) -> None:
    sample = packed(change_envelope=change)
    if sample.envelope.status in (pb.SAMPLE_STATUS_UNSPECIFIED, 77):
        pytest.skip("the status is looked at before")
    with pytest.raises(InvalidArgument, match="sample s"):
        check(sample)


@pytest.mark.parametrize("data", [b"\x0a\x7fabc", b"\x0a\x02\xff\xff", b"GET / HTTP/1.1\r\n", b"\x32\x02\x0a\x09", b""])
@pytest.mark.parametrize("padding", [0, 40_000])
def test_bytes_that_are_no_payload_are_not_kept(data: bytes, padding: int) -> None:
    sample = packed()
    sample.payload = data + b"\x12" + bytes([0x80 | padding & 0x7F, 0x80 | padding >> 7 & 0x7F, padding >> 14])
    sample.payload += b" " * padding
    with pytest.raises(InvalidArgument):
        check(sample)


def test_tokens_are_of_the_streams_vocabulary_where_it_is_known() -> None:
    for sample in (packed(), large()):
        check(sample, None)
        with pytest.raises(InvalidArgument, match="vocabulary of 5"):
            check(sample, 5)


@pytest.mark.parametrize(
    ("ranges", "mask", "refused"),
    [
        ((), [1, 1, 1], r"\[0, 3\)"),
        ((), [0, 0, 0], None),
        ([(0, 0, 2)], [1, 1, 1], r"\[2, 3\)"),
        ([(0, 0, 2)], [1, 1, 0], None),
        ([(0, 0, 1), (1, 2, 3)], [1, 1, 1], r"\[1, 2\)"),
        ([(0, 0, 1), (1, 2, 3)], [1, 0, 1], None),
    ],
)
def test_every_trained_token_is_of_a_version(
    ranges: list[tuple[int, int, int]], mask: list[int], refused: str | None
) -> None:
    sample = Sample(
        sample_id="s",
        group_id="g",
        index=0,
        prompt="",
        response="",
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        rollout_log_probs=np.zeros(3, np.float32),
        status=Status.COMPLETED,
        policy_ranges=[PolicyRange(*one) for one in ranges],
    ).pack()
    if refused is None:
        check(sample)
        return
    with pytest.raises(InvalidArgument, match=refused):
        check(sample)


def test_a_column_out_of_line_is_checked_by_its_header() -> None:
    def outside(num_bytes: int, shape: int, data: bytes = b"") -> pb.Sample:
        sample = packed()
        payload = pb.SamplePayload.FromString(sample.payload)
        payload.columns[0].data = data
        payload.columns[0].shape[0] = shape
        sample.payload = payload.SerializeToString()
        sample.envelope.digest = digest_of(sample.payload)
        sample.envelope.out_of_line.add(name="tokens", sha256=bytes(32), num_bytes=num_bytes)
        return sample

    check(outside(20, 5))
    for bad in (outside(16, 5), outside(24, 6), outside(20, 5, b"\0" * 20), outside(1 << 62, 1 << 60)):
        with pytest.raises(InvalidArgument):
            check(bad)
