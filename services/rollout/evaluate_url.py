"""Evaluates a model behind an OpenAI-compatible URL.

`python -m services.rollout.evaluate_url --config JOB.json --url http://HOST:PORT/v1 --model NAME` reads an
EvaluateRequest from stdin and writes an EvaluateResponse with the results to stdout. The reward service is the job's.
The key, if the server wants one, is in OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, HeadraceError
from headrace.job.schema.job import Job, read_job
from headrace.limits import PEER_WAIT_SECONDS
from headrace.rpc.log import configure_logging
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.http import Http
from services.rollout.evaluation.eval_file import EvalFiles
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE, Evaluator
from services.rollout.evaluation.openai_sampler import OpenAiSampler, UntokenizedEncoder
from services.rollout.production.sampling import job_params
from services.rollout.scoring import SampleScorer

KEY_VARIABLE = "OPENAI_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.evaluate_url", description=__doc__)
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
        patience_seconds=PEER_WAIT_SECONDS,
    )
    at_once = job.eval.eval_samples_in_flight or SAMPLES_AT_ONCE
    evaluator = Evaluator(
        encoder,
        sampler,
        scorer,
        job_params(job.rollout),
        seed=job.data.rollout_seed,
        files=EvalFiles.of(job.eval, job.buffer.prompt_root),
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
