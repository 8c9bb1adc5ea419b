"""What answers have told so far: a request that names it gets further than one of made-up ids."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_DEPTH = 24
_SAME = {
    "group_ids": "group_id",
    "renewed": "lease_id",
    "lost": "lease_id",
    "lease_ids": "lease_id",
    "sample_ids": "sample_id",
    "prompt_ids": "prompt_id",
    "engine_ids": "engine_id",
    "next_page_token": "page_token",
    "next_step": "step",
    "committed_step": "step",
    "position": "from_position",
}


class Memory:
    """Scalars by their field's name, messages by their type's name; the latest of each."""

    def __init__(self) -> None:
        self.values: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=_DEPTH))
        self.messages: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=_DEPTH))

    def learn(self, message: Message) -> None:
        """Everything that it holds, down to the leaves; the first few of what is repeated."""
        descriptor = message.DESCRIPTOR
        self.messages[descriptor.name].append(message)
        for field, value in message.ListFields():
            if field.message_type and field.message_type.GetOptions().map_entry:
                continue
            name = "stream" if (descriptor.name, field.name) == ("StreamConfig", "name") else key_of(field)
            for one in list(value)[:8] if field.is_repeated else [value]:
                if field.message_type:
                    self.learn(one)
                elif not isinstance(one, str | bytes) or len(one) < 2048:
                    self.values[name].append(one)


def key_of(field: FieldDescriptor) -> str:
    """Fields of one meaning have one name."""
    return _SAME.get(field.name, field.name)
