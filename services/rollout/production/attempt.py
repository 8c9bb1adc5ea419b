"""One request of several for a response."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import DeadlineExceeded, Unavailable
from services.rollout.engine.api import Generation, PromptImages


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """The properties that all requests for one response share."""

    request_id: str
    streaming: bool
    returns_partial: bool = False
    priority: int | None = None
    images: PromptImages | None = None
    routing_key: str | None = None


@dataclass
class ResponseAttempt:
    """One request of several for a response: the tokens with those of the requests before it, and why it failed."""

    so_far: Generation
    asked_tokens: int
    """The length that the response has when the request is answered in full"""
    failure: Unavailable | DeadlineExceeded | None = None

    @property
    def is_final(self) -> bool:
        return self.failure is None and self.so_far.finish is not None and self.so_far.finish.is_final

    @property
    def is_answered_in_full(self) -> bool:
        return self.failure is None and len(self.so_far.tokens) == self.asked_tokens

    def require_another(self, *, has_time: bool, returns_partial: bool) -> None:
        """Raises the failure where no other attempt follows, unless there are tokens to return."""
        if self.failure is not None and not has_time and not (returns_partial and self.so_far.tokens):
            raise self.failure
