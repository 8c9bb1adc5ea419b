"""Requests to engines and their results, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.trajectory import PolicyRange
from services.rollout.engine.replies import NO_COUNTS, EngineCounts, EngineResponse, Finish, SamplingMask

_NEUTRAL = {"ebnf": None, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Without `top_k` all tokens may be sampled; without `seed` it is random."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def is_constrained(self) -> bool:
        """True for a response that follows a grammar."""
        return self.json_schema is not None or self.regex is not None or self.ebnf is not None

    @property
    def is_narrowed(self) -> bool:
        """True where some tokens cannot be sampled, however likely they are."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0

    @property
    def can_be_continued(self) -> bool:
        """False where an engine begins a grammar, or counts the tokens that it penalizes, with the response."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty
        return not self.is_constrained and penalties == (0.0, 0.0, 1.0)

    def after(self, num_tokens: int) -> SamplingParams:
        """Returns what remains to be asked for once the response has `num_tokens` tokens."""
        return replace(
            self,
            max_new_tokens=self.max_new_tokens - num_tokens,
            min_new_tokens=max(0, min(self.min_new_tokens, self.max_new_tokens) - num_tokens),
        )

    def at_most(self, num_tokens: int) -> SamplingParams:
        """Returns the parameters with a response of at most `num_tokens` tokens."""
        most = min(self.max_new_tokens, num_tokens)
        return replace(self, max_new_tokens=most, min_new_tokens=min(self.min_new_tokens, most))

    def for_engine(self) -> dict[str, Any]:
        """Returns the parameters under SGLang's names."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.top_k is not None:
            params["top_k"] = self.top_k
        if self.stop:
            params["stop"] = list(self.stop)
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.min_new_tokens:
            params["min_new_tokens"] = self.min_new_tokens
        if self.json_schema is not None:
            params["json_schema"] = self.json_schema
        if self.regex is not None:
            params["regex"] = self.regex
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) != neutral:
                params[name] = value
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt of `num_tokens` tokens, as an engine wants them."""

    num_tokens: int
    engine_tokens: Sequence[int]
    """The prompt with one image token for each image, which the engine repeats for each of its embeddings."""
    data: Sequence[str]
    """Each image's file, in base64."""

    def body(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The fields of a request that continues the prompt, whose tokens come first in `tokens`."""
        return {"input_ids": [*self.engine_tokens, *tokens[self.num_tokens :]], "image_data": list(self.data)}


@dataclass(frozen=True, slots=True)
class Generation:
    """Response tokens, their log-probabilities and the weights that sampled them. `finish` is None in mid-stream.

    `routed_experts` are int32, little-endian, token by token from the prompt's first to the last but one, layer by
    layer; None where the request did not ask for them. Likewise the `sampling_mask`.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish | None
    policy_ranges: tuple[PolicyRange, ...]
    routed_experts: bytes | None = None
    counts: EngineCounts = NO_COUNTS
    sampling_mask: SamplingMask | None = None

    @classmethod
    def of(cls, answer: EngineResponse, policy_ranges: tuple[PolicyRange, ...], num_prompt_tokens: int) -> Generation:
        """Takes the response as far as its ranges go: tokens of refused weights are cut off, to be sampled again."""
        further = answer.routed_experts, answer.counts, answer.sampling_mask
        whole = cls(answer.tokens, answer.log_probs, answer.finish, policy_ranges, *further)
        length = policy_ranges[-1].end if policy_ranges else 0
        return whole if length == len(answer.tokens) else whole.until(length, num_prompt_tokens, Finish.ABORT)

    def until(self, length: int, num_prompt_tokens: int, finish: Finish) -> Generation:
        """Returns the first `length` tokens and what belongs to them."""
        experts = self.routed_experts
        if experts is not None and length < len(self.tokens):
            row_bytes = len(experts) // (num_prompt_tokens + len(self.tokens) - 1)
            experts = experts[: row_bytes * max(num_prompt_tokens + length - 1, 0)]
        ranges = tuple(replace(r, end=min(r.end, length)) for r in self.policy_ranges if r.start < length)
        mask = self.sampling_mask and self.sampling_mask.until(length)
        return Generation(self.tokens[:length], self.log_probs[:length], finish, ranges, experts, self.counts, mask)

    def then(self, later: Generation) -> Generation:
        """Appends what came when it was continued; neighbouring ranges of one version become one."""
        ranges = list(self.policy_ranges)
        for new in later.policy_ranges:
            moved = PolicyRange(new.policy_version, new.start + len(self.tokens), new.end + len(self.tokens))
            if ranges and ranges[-1].policy_version == moved.policy_version and ranges[-1].end == moved.start:
                moved = PolicyRange(moved.policy_version, ranges.pop().start, moved.end)
            ranges.append(moved)
        known = self.routed_experts or b""  # what came before was made with these, whatever the prefill chose
        experts = None if later.routed_experts is None else known + later.routed_experts[len(known) :]
        log_probs = self.log_probs + later.log_probs
        counts, mask = self.counts + later.counts, later.sampling_mask
        if self.sampling_mask is not None:
            mask = self.sampling_mask if mask is None else self.sampling_mask.then(mask)
        return Generation(self.tokens + later.tokens, log_probs, later.finish, tuple(ranges), experts, counts, mask)


NOTHING_YET = Generation((), (), Finish.ABORT, ())


@dataclass(frozen=True, slots=True)
class GroupJoin:
    """An engine's rank in a collective group."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
