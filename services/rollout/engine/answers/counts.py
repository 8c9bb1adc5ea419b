"""Numbers that engines report of their requests and that nobody trains on: prefix cache and speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.hooks.convert import cache_and_speculation
from headrace.limits import MAX_COUNTER
from headrace.trajectory import Sample
from services.rollout.engine.answers.bad_answer import BadAnswer, shown

_COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "completion_tokens",
    "correct_drafts": "spec_num_correct_drafts",
    "proposed_drafts": "spec_num_proposed_drafts",
    "verifications": "spec_verify_ct",
}
"""Under SGLang's names."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Sums over the requests of one response; a prompt counts each time that it is sent.

    The speculative ones are SGLang's: drafts that the model agreed with, drafts proposed, verifications.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    correct_drafts: int = 0
    proposed_drafts: int = 0
    verifications: int = 0

    def __add__(self, later: EngineCounts) -> EngineCounts:
        return EngineCounts(
            self.prompt_tokens + later.prompt_tokens,
            self.cached_tokens + later.cached_tokens,
            self.completion_tokens + later.completion_tokens,
            self.correct_drafts + later.correct_drafts,
            self.proposed_drafts + later.proposed_drafts,
            self.verifications + later.verifications,
        )

    @classmethod
    def of(cls, sample: Sample) -> EngineCounts:
        """Reads the counts of a sample that an earlier lease began."""
        spec, cache = cache_and_speculation(sample)
        return cls(
            cache.total_prompt_tokens,
            cache.cached_tokens,
            spec.completion_token_num,
            spec.spec_accept_token_num,
            spec.spec_draft_token_num,
            spec.spec_verify_ct,
        )

    def hook_fields(self) -> dict[str, Any]:
        """Returns `prefix_cache_info` and `spec_info` as a sample keeps them; without verifications only the first."""
        if not self.prompt_tokens:
            return {}
        cache = {"cached_tokens": self.cached_tokens, "total_prompt_tokens": self.prompt_tokens}
        if not self.verifications:
            return {"prefix_cache_info": cache}
        spec = {
            "spec_accept_token_num": self.correct_drafts,
            "spec_draft_token_num": self.proposed_drafts,
            "spec_verify_ct": self.verifications,
            "completion_token_num": self.completion_tokens,
        }
        return {"prefix_cache_info": cache, "spec_info": spec}


NO_COUNTS = EngineCounts()


def read_counts(meta: Mapping[str, Any]) -> EngineCounts:
    """Reads the counts of one response's meta_info; what is absent is 0. Raises BadAnswer."""
    found = {name: meta.get(key, 0) for name, key in _COUNTS.items()}
    for name, value in found.items():
        if type(value) is not int or not 0 <= value <= MAX_COUNTER:
            raise BadAnswer("counts", f"{_COUNTS[name]} is {shown(value)}")
    return EngineCounts(**found)
