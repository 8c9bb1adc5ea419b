"""An answer that is joined by hand is what the generated class would write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from services.buffer.ledger.group import SampleRecord
from services.buffer.wire import sample_bytes


@given(st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=70_000)), max_size=3))
def test_an_answer_is_what_its_generated_class_would_write(contents: list[tuple[bytes, bytes]]) -> None:
    expected = pb.FetchSamplesResponse()
    parts: list[bytes | memoryview] = []
    for text, payload in contents:
        envelope = sample_pb2.SampleEnvelope(sample_id="s", digest=text)
        expected.samples.add(envelope=envelope, payload=payload)
        parts += sample_bytes(
            SampleRecord("k", "s", 0, b"", 0, None, envelope.SerializeToString()), memoryview(payload)
        )
    assert pb.FetchSamplesResponse.FromString(b"".join(parts)) == expected
