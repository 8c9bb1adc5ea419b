"""The call of a generate function that the running code belongs to: its arguments, and its completions so far."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import FailedPrecondition
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.completion import Completion
from headrace.hooks.sample import Sample


@dataclass
class Call:
    """One call of the user's function; tasks that it starts belong to it."""

    args: HookArgs
    samples: Sequence[Sample]
    sampling_params: Mapping[str, Any]
    completions: dict[int, tuple[object, Completion]] = field(default_factory=dict)
    """The latest completion of each conversation, by the conversation's id; the object is stored so that it lives."""
    of_texts: list[Completion] = field(default_factory=list)
    """The completions that answered a text and not messages."""
    latest: Completion | None = None
    routing_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Its requests go to one engine, whose prefix cache its turns share."""
    _requests: int = 0

    def record(self, conversation: object, completion: Completion) -> None:
        """Stores the latest completion of a conversation."""
        self.completions[id(conversation)] = (conversation, completion)
        self.latest = completion
        if isinstance(conversation, str):
            self.of_texts.append(completion)

    def params(self) -> dict[str, Any]:
        """Returns the job's sampling parameters; each request has its own seed, which depends on the job's alone."""
        params = dict(self.sampling_params)
        self._requests += 1
        if "sampling_seed" in params and self._requests > 1:
            digest = hashlib.sha256(f"{params['sampling_seed']}/{self._requests}".encode()).digest()
            params["sampling_seed"] = int.from_bytes(digest[:4], "big") >> 1
        return params

    @property
    def tools(self) -> Sequence[Any] | None:
        """The tool definitions of the prompt's row, or None."""
        return self.samples[0].metadata.get("tools") if self.samples else None


_CALL: ContextVar[Call] = ContextVar("headrace_generate_call")


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """The block runs the user's function for `call`."""
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)


def current_call() -> Call:
    """Raises FailedPrecondition outside a generate function."""
    call = _CALL.get(None)
    if call is None:
        raise FailedPrecondition(
            "generate_single was called outside a generate function: name yours with --custom-generate-function-path, "
            "or try it with `headrace check hook`"
        )
    return call
