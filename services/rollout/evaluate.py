"""Evaluations: prompts of JSONL files through the engines and the judge, beside production."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.judge import Judge
from services.rollout.prompts import EncodedPrompt, PromptEncoder
from services.rollout.sampling import Maker, SampleRequest, merged_params, seed_of

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Samples finished since the one before; `results` on the last only."""

    done: int
    total: int
    samples: tuple[Sample, ...] = ()
    results: tuple[pb.EvalResult, ...] = ()


class Evaluator:
    """Judges whatever version the engines serve."""

    def __init__(
        self, encoder: PromptEncoder, maker: Maker, judge: Judge, defaults: SamplingParams, *, seed: int
    ) -> None:
        self._encoder = encoder
        self._maker = maker
        self._judge = judge
        self._defaults = defaults
        self._seed = seed

    async def run(self, datasets: Sequence[pb.EvalDataset]) -> AsyncIterator[Progress]:
        """Progress as samples finish, then the results. Raises InvalidArgument with file and line for bad data."""
        if not datasets:
            raise InvalidArgument("no data set is named", field="datasets")
        requests = [list(self._requests(dataset)) for dataset in datasets]
        total = sum(len(of_dataset) for of_dataset in requests)
        finished: list[list[Sample]] = [[] for _ in datasets]
        places = asyncio.Semaphore(_AT_ONCE)
        tasks = [
            asyncio.create_task(self._one(number, request, places))
            for number, of_dataset in enumerate(requests)
            for request in of_dataset
        ]
        done = 0
        try:
            for next_done in asyncio.as_completed(tasks):
                number, samples = await next_done
                finished[number] += samples
                done += 1
                yield Progress(done, total, tuple(samples))
        finally:
            for task in tasks:
                task.cancel()
        results = tuple(_result(d.name, samples) for d, samples in zip(datasets, finished, strict=True))
        yield Progress(done, total, results=results)

    async def _one(self, number: int, request: SampleRequest, places: asyncio.Semaphore) -> tuple[int, list[Sample]]:
        async with places:
            made = await self._maker.make_all([request], evaluation=True)
        return number, await self._judge.judge(made)

    def _requests(self, dataset: pb.EvalDataset) -> Iterator[SampleRequest]:
        if not dataset.name or dataset.n_samples_per_prompt < 1:
            raise InvalidArgument("a data set needs a name and n_samples_per_prompt of at least 1", field="datasets")
        params = merged_params(dataset.sampling, self._defaults)
        for row, (where, record) in enumerate(_rows(dataset)):
            prompt = self._prompt(dataset, where, record)
            label = record.get(dataset.label_key) if dataset.label_key else None
            metadata = record.get(dataset.metadata_key) if dataset.metadata_key else None
            group_id = f"eval/{dataset.name}/{row}"
            for index in range(dataset.n_samples_per_prompt):
                yield SampleRequest(
                    sample_id=f"{group_id}/{index}",
                    group_id=group_id,
                    index=index,
                    prompt=prompt,
                    label=None if label is None else str(label),
                    metadata=metadata if isinstance(metadata, dict) else {},
                    params=replace(params, seed=seed_of(self._seed, group_id, 0, index)),
                )

    def _prompt(self, dataset: pb.EvalDataset, where: str, record: dict[str, Any]) -> EncodedPrompt:
        content = record.get(dataset.input_key)
        if isinstance(content, str):
            return self._encoder.encode_text(content)
        if isinstance(content, list):
            return self._encoder.encode_messages(content, None)
        raise InvalidArgument(
            f"{where}: {dataset.input_key!r} must be text or an array of messages; keys here: {sorted(record)}",
            field="datasets.input_key",
        )


def _rows(dataset: pb.EvalDataset) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of each line used."""
    path = Path(dataset.path)
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path} on the rollout service's machine", field="datasets.path")
    limit = dataset.max_prompts if dataset.HasField("max_prompts") else None
    used = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if limit is not None and used >= limit:
                return
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InvalidArgument(f"{where}: not JSON: {error}", field="datasets.path") from error
            if not isinstance(record, dict):
                raise InvalidArgument(f"{where}: not a JSON object: {line[:60]!r}", field="datasets.path")
            used += 1
            yield where, record


def _result(name: str, samples: Sequence[Sample]) -> pb.EvalResult:
    judged = [s for s in samples if s.status is not Status.FAILED and s.reward is not None]
    versions = [r.policy_version for s in judged for r in s.policy_ranges]
    count = max(len(judged), 1)
    return pb.EvalResult(
        name=name,
        mean_reward=sum(s.reward or 0.0 for s in judged) / count,
        num_samples=len(judged),
        num_failed=len(samples) - len(judged),
        mean_response_tokens=sum(s.response_length for s in judged) / count,
        truncated_ratio=sum(s.status is Status.TRUNCATED for s in judged) / count,
        min_policy_version=min(versions, default=0),
        max_policy_version=max(versions, default=0),
    )
