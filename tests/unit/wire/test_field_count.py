"""Fields are counted before a request is parsed: of every call of every service, at every depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.errors import InvalidArgument
from headrace.protobuf import layout_of, require_few_fields, varint

MOST = 1_000
REQUESTS = {
    method.input_type
    for file in (buffer_pb2, reward_pb2, rollout_pb2, trainer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def delimited(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def floods(message: Descriptor) -> Iterator[tuple[str, bytes]]:
    """Each place in a request where entries can repeat without end: its name, and a request that repeats them."""
    for field in message.fields:
        if field.is_repeated and field.type != FieldDescriptor.TYPE_DOUBLE:
            is_packed = field.message_type is None and field.type != FieldDescriptor.TYPE_STRING
            entry = delimited(field.number, b"\1" * 8) if is_packed else delimited(field.number, b"")
            yield field.name, entry * 2 * MOST
            if is_packed:
                yield f"{field.name} packed", delimited(field.number, b"\1" * 10 * MOST)
        if field.message_type is not None:
            for name, inner in floods(field.message_type):
                yield f"{field.name}.{name}", delimited(field.number, inner)
    yield "unknown", delimited(1_000, b"") * 2 * MOST
    yield "behind a group", b"\xfb\x7f\xfc\x7f" + delimited(1_000, b"") * 2 * MOST


@pytest.mark.parametrize("request_type", sorted(REQUESTS, key=attrgetter("full_name")), ids=attrgetter("name"))
async def test_a_flood_anywhere_in_a_request_is_refused(request_type: Descriptor) -> None:
    layout = layout_of(request_type)
    for name, data in floods(request_type):
        with pytest.raises(InvalidArgument, match="make several calls") as caught:
            await require_few_fields(data, layout, MOST)
        assert caught.value.reason == "BATCH_TOO_LARGE", name


def count(message: Any) -> int:
    return sum(
        1 + (count(value) if isinstance(value, Message) else 0)
        for field, values in message.ListFields()
        for value in (values if field.is_repeated else [values])
    )


@pytest.mark.parametrize("front", [b"", b"\x08", b"\x0a", b"\x12\xff\xff\xff\x07"])
async def test_a_number_without_end_is_left_to_the_parser_at_once(front: bytes) -> None:
    """As one whole number it would take hours."""
    data = front + b"\xff" * (16 << 20)
    await require_few_fields(data, layout_of(buffer_pb2.SubmitPromptsRequest.DESCRIPTOR), MOST)
    with pytest.raises(DecodeError):
        buffer_pb2.SubmitPromptsRequest.FromString(data)


async def test_the_count_is_what_the_parser_finds() -> None:
    messages = [sample_pb2.ChatMessage(role="user", content="x" * 200) for _ in range(20)]
    prompt = sample_pb2.Prompt(prompt_id="p", messages=sample_pb2.ChatMessages(messages=messages), priority=-1)
    request = buffer_pb2.SubmitPromptsRequest(stream="train", prompts=[prompt] * 30)
    data, layout = request.SerializeToString(), layout_of(request.DESCRIPTOR)
    exact = count(request)
    assert exact == 1 + 30 * (1 + 3 + 20 * 3)
    await require_few_fields(data, layout, exact)
    with pytest.raises(InvalidArgument, match=f"has {exact} entries"):
        await require_few_fields(data, layout, exact - 1)


@pytest.mark.parametrize("data", [b"\xff" * 5_000, b"\x0a" * 5_000, b"\x0f" * 5_000, b"\x12\xff\xff\xff\xff\x7f" * 900])
async def test_what_is_no_message_is_counted_to_its_end(data: bytes) -> None:
    with suppress(InvalidArgument):
        await require_few_fields(data, layout_of(buffer_pb2.SubmitPromptsRequest.DESCRIPTOR), MOST)
