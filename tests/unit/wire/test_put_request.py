"""Requests that are written and read by hand mean what the generated classes say they mean, at both ends."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import protobuf as put_request_module
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.protobuf import RawPut, parse_puts, put_request, raw_put

samples = st.builds(
    lambda sample_id, payload, reward: sample_pb2.Sample(
        envelope=sample_pb2.SampleEnvelope(sample_id=sample_id, reward=reward, payload_bytes=len(payload)),
        payload=payload,
    ),
    st.text(max_size=8), st.binary(max_size=300), st.none() | st.floats(),
)  # fmt: skip
puts = st.builds(
    lambda lease_id, group_id, samples, outcome: pb.GroupPut(
        lease_id=lease_id, group_id=group_id, samples=samples, outcome=outcome
    ),
    st.text(max_size=8), st.text(max_size=200), st.lists(samples, max_size=3), st.integers(0, 3),
)  # fmt: skip


def put_of(samples: list[sample_pb2.Sample], failure: str | None, rewards: list[float]) -> pb.GroupPut:
    return pb.GroupPut(
        lease_id="lease",
        samples=samples,
        failure=sample_pb2.Failure(reason=failure) if failure else None,
        rewards=rewards,
    )


@given(
    st.lists(
        st.builds(
            put_of,
            st.lists(samples | st.just(sample_pb2.Sample(payload=b"bare")) | st.just(sample_pb2.Sample()), max_size=3),
            st.none() | st.text(max_size=8),
            st.lists(st.floats(), max_size=2),
        ),
        max_size=3,
    )
)
def test_a_request_with_large_payloads_has_the_bytes_that_its_generated_class_writes(groups: list[pb.GroupPut]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(put_request_module, "_LARGE_BYTES", 0)
        assert put_request(groups) == pb.PutGroupsRequest(groups=groups).SerializeToString()


def comparable(puts: list[RawPut]) -> list[tuple[bytes, list[tuple[bytes, bytes]]]]:
    return [(p.rest.SerializeToString(), [(s.envelope, bytes(s.payload)) for s in p.samples]) for p in puts]


@given(st.lists(puts, max_size=3))
def test_a_request_is_read_as_its_generated_class_reads_it(groups: list[pb.GroupPut]) -> None:
    data = pb.PutGroupsRequest(groups=groups).SerializeToString()
    assert put_request(groups) == data
    assert comparable(parse_puts(data)) == comparable([raw_put(group) for group in groups])


@given(st.lists(puts, min_size=1, max_size=2), st.data())
@settings(max_examples=300)
def test_bytes_that_are_no_request_are_refused_or_mean_the_same_to_both(
    groups: list[pb.GroupPut], draw: st.DataObject
) -> None:
    data = bytearray(pb.PutGroupsRequest(groups=groups).SerializeToString())
    for _ in range(3):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        expected = [raw_put(group) for group in pb.PutGroupsRequest.FromString(bytes(data)).groups]
    except DecodeError:
        return  # an envelope is parsed later, so not everything is refused here
    found = parse_puts(bytes(data))
    assert [p.rest for p in found] == [p.rest for p in expected]
    for sample, same in zip(
        (s for p in found for s in p.samples), (s for p in expected for s in p.samples), strict=True
    ):
        assert bytes(sample.payload) == bytes(same.payload)
        envelope = sample_pb2.SampleEnvelope.FromString
        assert envelope(sample.envelope).SerializeToString() == envelope(same.envelope).SerializeToString()
