"""Samples from a server that speaks OpenAI's API, for evaluations of models that no engine here serves.

Nothing is known of their weights, and of their tokens only the number, as the server counts: ids and log-probs are 0.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, Unavailable
from headrace.rpc.retry import Backoff
from headrace.trajectory import Failure, Sample, Status
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.http import Http
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import SampleRequest, failed_sample

_MOST_BYTES = 16 << 20
_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 30.0


class UntokenizedEncoder(PromptEncoder):
    """Leaves prompts as they are: the server has the tokenizer and the chat template."""

    def load(self) -> None:
        """Loads nothing."""

    def encode_plain(self, text: str) -> EncodedPrompt:
        return EncodedPrompt(text, ())

    def encode_messages(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> EncodedPrompt:
        return EncodedPrompt(json.dumps(messages, ensure_ascii=False), (), messages=messages, tools=tools or ())


class OpenAiSampler:
    """A `Sampler`. Messages go to /chat/completions, texts to /completions."""

    def __init__(self, http: Http, model: str, *, seconds: float) -> None:
        self._http = http
        self._model = model
        self._seconds = seconds
        self.in_flight = 0

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns one sample for each request; one that the server refuses, or does not answer in time, is FAILED."""
        return await asyncio.gather(*(self._sample(request) for request in requests))

    async def _sample(self, request: SampleRequest) -> Sample:
        self.in_flight += 1
        try:
            return _sample(request, await self._reply(request))
        except HeadraceError as error:
            return failed_sample(request, Failure(error.reason, error.message))
        finally:
            self.in_flight -= 1

    async def _reply(self, request: SampleRequest) -> Mapping[str, Any]:
        """Asks again while the server is away or has too much to do, until the time is over."""
        end = time.monotonic() + self._seconds
        path, body = _asked(request, self._model)
        backoff = Backoff(_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
        while True:
            try:
                left = max(end - time.monotonic(), 1e-3)
                reply = await self._http.request("POST", path, body, seconds=left, max_bytes=_MOST_BYTES)
                return reply.json()
            except Unavailable:
                if end - time.monotonic() <= backoff.seconds:
                    raise
            await backoff.sleep()


def _asked(request: SampleRequest, model: str) -> tuple[str, Mapping[str, Any]]:
    params, prompt = request.params, request.prompt
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if params.seed is not None:
        body["seed"] = params.seed
    if prompt.messages is None:
        return "/completions", {**body, "prompt": prompt.text}
    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    return "/chat/completions", {**body, **tools, "messages": [dict(message) for message in prompt.messages]}


def _choice_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswer("choices", "the answer has no choices[0]")
    return choices[0]


def _sample(request: SampleRequest, reply: Mapping[str, Any]) -> Sample:
    choice, num_tokens = _choice_of(reply), _num_tokens(reply, request.params.max_new_tokens)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str | None):
        raise BadAnswer("content", f"the answer's content is {type(text).__name__}, no text")
    return Sample(
        sample_id=request.sample_id,
        group_id=request.group_id,
        index=request.index,
        prompt=request.prompt.text,
        response=text or "",
        tokens=np.zeros(1 + num_tokens, dtype=np.int32),
        loss_mask=np.zeros(num_tokens, dtype=np.uint8),
        rollout_log_probs=np.zeros(num_tokens, dtype=np.float32),
        status=Status.TRUNCATED if choice.get("finish_reason") == "length" else Status.COMPLETED,
        label=request.label,
        metadata=request.metadata,
        sampling_params=asdict(request.params),
    )


def _num_tokens(reply: Mapping[str, Any], most: int) -> int:
    """The server's count of the response's tokens; 0 where it gives none, or one that cannot be."""
    usage = reply.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and 0 <= count <= most else 0
