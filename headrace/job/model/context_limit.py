"""Computes how many tokens a prompt and its response may have together, and which option says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.job.schema.parts.engine_group import EngineGroup
from headrace.job.schema.production import RolloutSection
from headrace.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """`name` is the option that sets the limit, or a description of it."""

    tokens: int
    name: str

    @classmethod
    def of(
        cls,
        rollout: RolloutSection,
        sglang: Mapping[str, Any],
        architecture: Architecture,
        groups: Sequence[EngineGroup] = (),
    ) -> ContextLimit:
        """The job's own limit if it has one, else that of its engines."""
        if rollout.rollout_max_context_len is not None:
            return cls(rollout.rollout_max_context_len, "rollout_max_context_len")
        return cls.of_engines(sglang, architecture, groups)

    @classmethod
    def of_engines(
        cls, sglang: Mapping[str, Any], architecture: Architecture, groups: Sequence[EngineGroup] = ()
    ) -> ContextLimit:
        """The length beyond which an engine refuses a request: of groups the shortest, as the router chooses any."""
        own = [
            cls(group.overrides["context_length"], f"context_length of engine group {group.name}")
            for group in groups
            if "context_length" in group.overrides
        ]
        others = [cls._of_all(sglang, architecture)] if len(own) < len(groups) or not groups else []
        return min(others + own, key=lambda limit: limit.tokens)

    @classmethod
    def _of_all(cls, sglang: Mapping[str, Any], architecture: Architecture) -> ContextLimit:
        given = sglang.get("context_length")
        if given is not None:
            return cls(given, "--sglang-context-length")
        return cls(architecture.max_position_embeddings, "the model's max_position_embeddings")

    def too_long(self, num_tokens: int) -> str:
        """A message for a prompt that leaves no room for a response."""
        length = f"the prompt has {num_tokens:,} tokens, which leaves no room for a response"
        return f"{length}: {self.name} is {self.tokens:,}"
