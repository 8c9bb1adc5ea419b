"""Evaluates a model behind a URL that speaks OpenAI's API, which no engine here serves.

`python -m services.rollout.evaluation.by_url --config JOB.json --url http://HOST:PORT/v1 --model NAME` reads an
EvaluateRequest from stdin and writes an EvaluateResponse with the results to stdout. The reward service is the job's.
The key, if the server wants one, is in OPENAI_API_KEY.
Nothing is known of the model's weights, and of its tokens only the number, as the server counts: ids and log-probs
are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, HeadraceError, Unavailable
from headrace.job.schema.job import Job, read_job
from headrace.rpc.log import configure_logging
from headrace.rpc.retry import Backoff
from headrace.trajectory import Failure, Sample, Status
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.http import Http
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import SAMPLES_AT_ONCE, EvalRunner
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import SampleRequest, failed_sample, job_params
from services.rollout.scoring import SampleScorer

KEY_VARIABLE = "OPENAI_API_KEY"
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

    async def _reply(self, request: SampleRequest) -> _Completion:
        """Asks again while the server is away or has too much to do, until the time is over."""
        end = time.monotonic() + self._seconds
        path, body = _request(request, self._model)
        backoff = Backoff(_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
        while True:
            try:
                left = max(end - time.monotonic(), 1e-3)
                reply = await self._http.request("POST", path, body, seconds=left, max_bytes=_MOST_BYTES)
                return reply.decode(_Completion)
            except Unavailable:
                if end - time.monotonic() <= backoff.seconds:
                    raise
            await backoff.sleep()


def _request(request: SampleRequest, model: str) -> tuple[str, Mapping[str, Any]]:
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


class _Message(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct, frozen=True):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    completion_tokens: int | None = None


class _Completion(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage | None = None


def _sample(request: SampleRequest, reply: _Completion) -> Sample:
    choice, num_tokens = reply.choices[0], _num_tokens(reply, request.params.max_new_tokens)
    text = choice.message.content if choice.message else choice.text
    return Sample(
        sample_id=request.sample_id,
        group_id=request.group_id,
        index=request.index,
        prompt=request.prompt.text,
        response=text or "",
        tokens=np.zeros(1 + num_tokens, dtype=np.int32),
        loss_mask=np.zeros(num_tokens, dtype=np.uint8),
        rollout_log_probs=np.zeros(num_tokens, dtype=np.float32),
        status=Status.TRUNCATED if choice.finish_reason == "length" else Status.COMPLETED,
        label=request.label,
        metadata=request.metadata,
        sampling_params=asdict(request.params),
    )


def _num_tokens(reply: _Completion, most: int) -> int:
    """The server's count of the response's tokens; 0 where it gives none, or one that cannot be."""
    count = (reply.usage.completion_tokens if reply.usage else None) or 0
    return count if 0 <= count <= most else 0


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.evaluation.by_url", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the job.json")
    parser.add_argument("--url", required=True, help="http://HOST:PORT/v1")
    parser.add_argument("--model", required=True, help="the server's name of the model")
    args = parser.parse_args(argv)
    configure_logging("evaluation")
    request = rollout_pb2.EvaluateRequest.FromString(sys.stdin.buffer.read())
    try:
        job, asks = read_job(args.config), request.return_samples
        reply = asyncio.run(evaluate_url(job, args.url, args.model, request.datasets, return_samples=asks))
    except HeadraceError as error:
        print(error.message, file=sys.stderr)  # noqa: T201  # one line to a person
        return 1
    sys.stdout.buffer.write(reply.SerializeToString())
    return 0


async def evaluate_url(
    job: Job, url: str, model: str, datasets: Sequence[rollout_pb2.EvalDataset], *, return_samples: bool
) -> rollout_pb2.EvaluateResponse:
    """Returns the results, whose versions are 0. Raises what ended the evaluation."""
    if job.services.reward_address is None:
        raise ConfigError("services.reward_address is not set: samples could not be scored")
    key = os.environ.get(KEY_VARIABLE)
    http = Http(url.rstrip("/"), headers={"Authorization": f"Bearer {key}"} if key else {})
    seconds = job.rollout.generate_timeout_seconds
    sampler = OpenAiSampler(http, model, seconds=seconds)
    encoder = UntokenizedEncoder(job.model.hf_checkpoint, apply_chat_template=job.data.apply_chat_template)
    scorer = SampleScorer(
        job.services.reward_address,
        item_seconds=job.reward.reward_timeout_seconds,
        patience_seconds=job.reward.reward_patience_seconds,
    )
    at_once = job.eval.eval_samples_in_flight or SAMPLES_AT_ONCE
    evaluator = EvalRunner(
        encoder,
        sampler,
        scorer,
        job_params(job.rollout),
        seed=job.data.rollout_seed,
        files=replace(EvalFiles.of(job.eval, job.buffer.prompt_root), functions=()),
        slots=EngineSlots(Shares({Kind.EVALUATION: at_once}), max_waiting=0),
        scores_groups=job.reward.group_rm,
    )
    reply, samples = rollout_pb2.EvaluateResponse(), list[sample_pb2.Sample]()
    try:
        async for progress in evaluator.run(datasets):
            samples += [sample.pack() for sample in progress.samples] if return_samples else []
            reply = rollout_pb2.EvaluateResponse(done=progress.done, total=progress.total, results=progress.results)
    finally:
        encoder.close()
        await asyncio.gather(http.close(), scorer.close())
    reply.samples.extend(samples)
    return reply


if __name__ == "__main__":
    sys.exit(main())
