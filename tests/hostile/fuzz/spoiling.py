"""A request with some of its fields put to their edges, or its bytes damaged."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from headrace.api.sample.v1 import sample_pb2
from tests.hostile.fuzz.templates import is_map
from tests.hostile.fuzz.values import COUNTS, LARGE_BYTES, LARGE_STRING, edges
from tests.hostile.wire import sha256_digest

_LARGE_SHARE = 0.004
_MANY_SHARE = 0.02
_BYTES_SHARE = 0.06
_SEALED_SHARE = 0.8
_UNKNOWN_TAG = b"\x82\xfa\x01"
"""Field 4,000, of bytes."""
_ENDLESS = (11, 1_000, 1 << 20, 1 << 23)
"""Bytes of a number that does not end."""


class Spoiler:
    """All chance is the given one's."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def request(self, message: Message) -> bytes:
        """The message's bytes: a third as they are, most with one to three fields spoiled, some damaged."""
        chance = self._random
        for _ in range(chance.choice((0, 0, 0, 1, 1, 1, 1, 2, 3))):
            self._spoil(message)
        data = message.SerializeToString()
        return self._damaged(data) if chance.random() < _BYTES_SHARE else data

    def _damaged(self, data: bytes) -> bytes:
        chance = self._random
        spoiled = bytearray(data or b"\x0a")
        kind = chance.randrange(8)
        if kind == 6:
            return bytes(spoiled) + b"\x08" + b"\xff" * chance.choice(_ENDLESS)
        if kind == 7:
            spoiled[0] ^= chance.randrange(1, 8)  # the first field has another wire type than its own
            return bytes(spoiled)
        if kind == 4:
            return bytes(spoiled) + _unknown(chance.choice((0, 100, 1 << 20)), chance.choice((1, 1, 1_000)))
        if kind == 5:
            return bytes(spoiled) * 2  # fields that come once come twice, and lists are as long again
        if kind == 0:
            return bytes(spoiled[: chance.randrange(len(spoiled))])
        if kind == 1:
            return chance.randbytes(chance.randrange(1, 60))
        for _ in range(1 if kind == 2 else 5):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        return bytes(spoiled)

    def _spoil(self, message: Any) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._random.choice(fields)
        if is_map(field):
            self._spoil_map(message, field)
        elif field.message_type:
            self._spoil_message(message, field)
        elif field.name == "payload" and self._random.random() < 0.7:
            self._spoil_payload(message)
        elif field.is_repeated:
            self._spoil_list(message, field)
        else:
            setattr(message, field.name, self._value(field))

    def _spoil_message(self, message: Any, field: FieldDescriptor) -> None:
        chance = self._random
        if chance.random() < 0.1:
            message.ClearField(field.name)
        elif not field.is_repeated:
            child = getattr(message, field.name)
            child.SetInParent()
            self._spoil(child)
        else:
            children = getattr(message, field.name)
            if not children or chance.random() < 0.1:
                children.add()
            self._spoil(chance.choice(children))
            if chance.random() < _MANY_SHARE:
                one = type(children[0])()
                one.CopyFrom(chance.choice(children))
                children.extend([one] * chance.choice(COUNTS[:-1]) if one.ByteSize() < 4096 else [one])

    def _spoil_list(self, message: Any, field: FieldDescriptor) -> None:
        values = getattr(message, field.name)
        if values and self._random.random() < 0.3:
            values.append(values[0])
        elif self._random.random() < _MANY_SHARE * 2:
            value = self._value(field)
            small = not isinstance(value, str | bytes) or len(value) < 64
            values.extend([value] * (self._random.choice(COUNTS) if small else 2))
        else:
            values.append(self._value(field))

    def _spoil_map(self, message: Any, field: FieldDescriptor) -> None:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        entries = getattr(message, field.name)
        if self._random.random() < _MANY_SHARE * 3:
            known = self._value(value)
            entries.update({str(i): known for i in range(self._random.choice(COUNTS[:-1]))})
        else:
            entries[self._value(key)] = self._value(value)

    def _spoil_payload(self, message: Any) -> None:
        """The sample's payload, with the digest of what it became (mostly)."""
        try:
            inner = sample_pb2.SamplePayload.FromString(message.payload)
        except DecodeError:
            return
        self._spoil(inner)
        message.payload = inner.SerializeToString() if self._random.random() < 0.8 else self._random.randbytes(40)
        if self._random.random() < _SEALED_SHARE:
            message.envelope.digest = sha256_digest(message.payload)
            message.envelope.payload_bytes = len(message.payload)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and self._random.random() < _LARGE_SHARE:
            return LARGE_BYTES if field.type == FieldDescriptor.TYPE_BYTES else LARGE_STRING
        return self._random.choice(edges(field))


def _unknown(num_bytes: int, times: int) -> bytes:
    """A field that no message has, several times where it is small."""
    length = bytearray()
    left = num_bytes
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    one = _UNKNOWN_TAG + bytes([*length, left]) + bytes(num_bytes)
    return one * (times if num_bytes < 1_000 else 1)
