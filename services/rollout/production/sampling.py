"""Sampling parameters, seeds, and the generation of one sample."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import HeadraceError, InvalidArgument
from headrace.job.schema.production import RolloutSection
from headrace.limits import (
    MAX_COUNTER,
    MAX_NEW_TOKENS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TEXT_CHARACTERS,
    from_json,
    require_at_most,
    require_between,
    require_finite,
)
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.trajectory import ROUTED_EXPERTS, Failure, Sample, Status
from services.rollout.engine.api import NOTHING_YET, Generation, SamplingParams
from services.rollout.engine.replies import BadAnswer, Finish
from services.rollout.production.constraint import require_regex, require_schema
from services.rollout.production.generator import Generator
from services.rollout.production.partial import generation_of
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder

_MAX_TOP_K = (1 << 31) - 1  # what SGLang holds in an int32


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to generate. Its id is unique for each attempt."""

    sample_id: str
    group_id: str
    index: int
    prompt: EncodedPrompt
    label: str | None
    metadata: Mapping[str, Any]
    params: SamplingParams
    begun: Sample | None = None
    """The partial sample of an earlier lease."""
    hook_fields: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's hook_json: what users' functions see of it beside its text."""

    @classmethod
    def of(
        cls,
        prompt: pb.Prompt,
        encoded: EncodedPrompt,
        params: SamplingParams,
        *,
        sample_id: str,
        group_id: str,
        index: int,
    ) -> SampleRequest:
        """Returns the request for one sample of a prompt; `params` hold its own seed."""
        return cls(
            sample_id=sample_id,
            group_id=group_id,
            index=index,
            prompt=encoded,
            label=prompt.label if prompt.HasField("label") else None,
            metadata=from_json(prompt.metadata_json),
            params=params,
            hook_fields=from_json(prompt.hook_json),
        )

    def sample(self, loss_mask: ArrayLike, log_probs: ArrayLike, status: Status, **values: Any) -> Sample:
        """Returns a sample of this request, with the prompt's tokens and no response where `values` say nothing else.

        `loss_mask` and `log_probs`: R entries. `values`: further fields of the sample, or others than the request's.
        """
        made: dict[str, Any] = {
            "sample_id": self.sample_id,
            "group_id": self.group_id,
            "index": self.index,
            "prompt": self.prompt.text,
            "response": "",
            "tokens": self.prompt.tokens,
            "label": self.label,
            "metadata": self.metadata,
            "sampling_params": asdict(self.params),
            "hook_fields": self.hook_fields,
            **values,
        }
        made["tokens"] = np.asarray(made["tokens"], dtype=np.int32)
        mask, known = np.asarray(loss_mask, dtype=np.uint8), np.asarray(log_probs, dtype=np.float32)
        return Sample(**made, loss_mask=mask, rollout_log_probs=known, status=status)


def span_of(requests: Sequence[SampleRequest], *, evaluation: bool) -> AbstractContextManager[tracing.Span]:
    """A span around the generation of samples. Evaluations are not traced: nothing is trained on them."""
    traces = () if evaluation else tracing.samples((request.group_id, request.index) for request in requests)
    return tracing.span("rl.sample", traces, {"headrace.sample": requests[0].sample_id})


def job_params(rollout: RolloutSection) -> SamplingParams:
    """Returns the values of the job's --rollout-* flags."""
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


def merged_params(asked: pb.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """Returns the caller's parameters, the rest from `defaults`. Raises InvalidArgument for a value out of range."""
    params = SamplingParams(
        max_new_tokens=asked.max_new_tokens if asked.HasField("max_new_tokens") else defaults.max_new_tokens,
        temperature=asked.temperature if asked.HasField("temperature") else defaults.temperature,
        top_p=asked.top_p if asked.HasField("top_p") else defaults.top_p,
        top_k=asked.top_k if asked.HasField("top_k") else defaults.top_k,
        stop=tuple(asked.stop) or defaults.stop,
        stop_token_ids=tuple(asked.stop_token_ids) or defaults.stop_token_ids,
        seed=asked.seed if asked.HasField("seed") else defaults.seed,
        min_new_tokens=asked.min_new_tokens if asked.HasField("min_new_tokens") else defaults.min_new_tokens,
        json_schema=asked.json_schema if asked.HasField("json_schema") else None,
        regex=asked.regex if asked.HasField("regex") else None,
    )
    if params.json_schema is not None:
        require_schema(params.json_schema, "sampling.json_schema")
    if params.regex is not None:
        require_regex(params.regex, "sampling.regex")
    require_in_range(params, lambda name: f"sampling.{name}")
    return params


def require_in_range(params: SamplingParams, called: Callable[[str], str]) -> None:
    """Raises InvalidArgument for a value out of range, by the name that its request `called` it."""
    require_one_constraint(params)
    require_between(params.max_new_tokens, 1, MAX_NEW_TOKENS, called("max_new_tokens"))
    require_between(params.min_new_tokens, 0, params.max_new_tokens, called("min_new_tokens"))
    for name, value, least, most in (
        ("temperature", params.temperature, 0.0, MAX_TEMPERATURE),
        ("min_p", params.min_p, 0.0, 1.0),
        ("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        ("presence_penalty", params.presence_penalty, -2.0, 2.0),
    ):
        require_finite(value, called(name), least=least, most=most)
    for name, value, most in (("top_p", params.top_p, 1), ("repetition_penalty", params.repetition_penalty, 2)):
        if not 0 < value <= most:
            raise InvalidArgument(f"{called(name)} is {value:g}, must be in (0, {most}]", field=called(name))
    require_at_most(len(params.stop), MAX_STOPS, called("stop"))
    require_at_most(len(params.stop_token_ids), MAX_STOPS, called("stop_token_ids"))
    if not all(0 < len(stop) <= MAX_TEXT_CHARACTERS for stop in params.stop):
        raise InvalidArgument(
            f"{called('stop')} has an empty string, or one of more than {MAX_TEXT_CHARACTERS} characters",
            field=called("stop"),
        )
    if any(token < 0 for token in params.stop_token_ids):
        raise InvalidArgument(f"stop token id {min(params.stop_token_ids)} is negative", field=called("stop_token_ids"))
    if params.seed is not None:
        require_between(params.seed, -MAX_COUNTER, MAX_COUNTER, called("seed"))
    if params.top_k == 0:
        raise InvalidArgument("top_k is 0: leave it out to sample from all tokens", field=called("top_k"))
    if params.top_k is not None:
        require_between(params.top_k, 1, _MAX_TOP_K, called("top_k"))


def require_one_constraint(params: SamplingParams) -> None:
    """Raises InvalidArgument for what no engine can follow together."""
    if params.json_schema is not None and params.regex is not None:
        raise InvalidArgument("json_schema and regex are both set: leave one of them out", field="sampling.regex")
    if params.is_constrained and params.min_new_tokens:
        raise InvalidArgument(
            f"min_new_tokens is {params.min_new_tokens}, and json_schema or regex says when the response ends: leave "
            "one of them out",
            field="sampling.min_new_tokens",
        )


def seed_of(rollout_seed: int, group_id: str, attempt: int, index: int) -> int:
    """Returns 31 bits that are equal for equal arguments on every machine."""
    digest = hashlib.sha256(f"{rollout_seed}/{group_id}/{attempt}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


STATUS = {Finish.STOP: Status.COMPLETED, Finish.LENGTH: Status.TRUNCATED, Finish.ABORT: Status.ABORTED}


class Sampler(Protocol):
    """Generates samples, with the engines or with a user's function."""

    @property
    def in_flight(self) -> int:
        """Samples that are being generated."""

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns samples without rewards; one that failed is FAILED, one that was returned in part is ABORTED."""


def top_k_of_mask(mask_tokens: int) -> int:
    """The top_k of a request that has none, where a mask has `mask_tokens` at most: ties at the end need some room."""
    return max(1, mask_tokens * 15 // 16)


def masked(params: SamplingParams, mask_tokens: int | None) -> tuple[SamplingParams, bool]:
    """Returns the parameters with which an engine returns masks, and whether it is asked for them."""
    if mask_tokens is None or not params.is_narrowed:
        return params, False
    return replace(params, top_k=min(params.top_k or top_k_of_mask(mask_tokens), mask_tokens)), True


class EngineSampler:
    """Generates single samples. A failure is the sample's own, which is FAILED with the reason.

    `num_layers` is set when engines are asked for the routed experts, `mask_tokens` (the most that a mask has) when
    they are asked for the sampling masks of what is trained, `evaluation_priority` when they schedule by priority. Of a
    group's samples `samples_together` go to one engine, whose prefix cache they share.
    """

    def __init__(
        self,
        generator: Generator,
        encoder: PromptEncoder,
        *,
        seconds: float,
        num_layers: int | None = None,
        mask_tokens: int | None = None,
        evaluation_priority: int | None = None,
        samples_together: int = 1,
    ) -> None:
        self._generator = generator
        self._samples_together = samples_together
        self._encoder = encoder
        self._seconds = seconds
        self._num_layers = num_layers
        self._mask_tokens = mask_tokens
        self._evaluation_priority = evaluation_priority
        self.in_flight = 0

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns one sample for each request, generated side by side."""
        asked = [self.sample(request, return_partial, evaluation=evaluation) for request in requests]
        return await asyncio.gather(*asked)

    async def sample(
        self, request: SampleRequest, return_partial: asyncio.Event | None = None, *, evaluation: bool = False
    ) -> Sample:
        """Returns a sample without a reward."""
        priority = self._evaluation_priority if evaluation else None
        params, has_mask = masked(request.params, None if evaluation else self._mask_tokens)
        begun = generation_of(request.begun) if request.begun else NOTHING_YET
        if has_mask and begun.sampling_mask is None:
            begun = NOTHING_YET
        if begun.finish and begun.finish.is_final:
            return self._sample(request, begun)
        self.in_flight += 1
        try:
            with span_of([request], evaluation=evaluation):
                generation = await self._generator.generate(
                    request.prompt.tokens,
                    params,
                    request_id=request.sample_id,
                    seconds=self._seconds,
                    begun=begun,
                    return_partial=return_partial,
                    priority=priority,
                    images=request.prompt.for_engine,
                    routing_key=f"{request.group_id}/{request.index // self._samples_together}",
                    sampling_mask=has_mask,
                )
            return self._sample(request, generation)
        except HeadraceError as error:
            log.warning("sample_failed", sample_id=request.sample_id, reason=error.reason, message=error.message)
            return failed_sample(request, Failure(error.reason, error.message))
        finally:
            self.in_flight -= 1

    def _sample(self, request: SampleRequest, generation: Generation) -> Sample:
        return request.sample(
            np.ones(len(generation.tokens)),
            generation.log_probs,
            STATUS[generation.finish or Finish.ABORT],
            response=self._encoder.decode(generation.tokens),
            tokens=[*request.prompt.tokens, *generation.tokens],
            policy_ranges=generation.policy_ranges,
            columns=self._columns(request, generation),
            hook_fields={**request.hook_fields, **generation.counts.hook_fields()},
        )

    def _columns(self, request: SampleRequest, generation: Generation) -> dict[str, NDArray[Any]]:
        found = dict(request.prompt.images.columns) if request.prompt.images else {}
        if generation.sampling_mask is not None:
            found |= generation.sampling_mask.columns
        if self._num_layers is None or not generation.tokens:
            return found
        if not generation.routed_experts:
            raise BadAnswer(
                "routed_experts", f"{len(generation.tokens)} tokens, and no experts that they were routed to"
            )
        num_tokens = len(request.prompt.tokens) + len(generation.tokens) - 1
        chosen = np.frombuffer(generation.routed_experts, dtype="<i4").astype(np.int16)
        if not chosen.size or chosen.size % (num_tokens * self._num_layers):
            raise BadAnswer(
                "routed_experts", f"{chosen.size} experts for {num_tokens} tokens, {self._num_layers} layers"
            )
        return found | {ROUTED_EXPERTS: chosen.reshape(num_tokens, self._num_layers, -1)}


def failed_sample(request: SampleRequest, failure: Failure) -> Sample:
    """Returns a sample with the prompt's tokens and the reason why there is no response."""
    return request.sample((), (), Status.FAILED, failure=failure)
