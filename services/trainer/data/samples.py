"""The samples of a step: fetched from the buffer, read, set aside where they cannot be used, and logged.

A sample that ended the step would end every start of the trainer: the same batch comes back. So each rank reads its
own samples, all hear which of them are bad, and the step is planned again without those, until nobody finds another.
The decision follows from the sample's bytes. What may follow from something else (a damaged transfer) is written down
by `SkippedSamples`, so that a step that is run again sets the same samples aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DataLoss, HeadraceError, InvalidArgument, NotFound
from headrace.limits import object_of_line
from headrace.rpc.log import log
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample
from services.trainer.data.buffer import TrainerBuffer
from services.trainer.durable import append_rows
from services.trainer.megatron.parallel import Layout, gathered
from services.trainer.plan.batch import Batch, SampleFacts
from services.trainer.rl.seen_tokens import SeenTokens


@dataclass(frozen=True, slots=True)
class UnusableSample:
    """Stands for a sample that could not be read or used, and says why."""

    sample_id: str
    reason: str
    message: str


Read = Sample | UnusableSample
FetchSamples = Callable[[Sequence[str]], Sequence[Read]]
"""One answer for each id, in order."""


@dataclass(frozen=True, slots=True)
class Readable:
    samples: Sequence[SampleFacts]
    """All of the batch, equal on all ranks; bad ones are FAILED."""
    own: Mapping[str, Sample]
    """This rank's, by id."""
    set_aside: Sequence[UnusableSample]
    """Found bad now, equal on all ranks."""


def read_samples(
    samples: Sequence[SampleFacts],
    fetch: FetchSamples,
    own: Callable[[Sequence[SampleFacts]], Sequence[str]],
    check: Callable[[Sample], None],
    layout: Layout,
) -> Readable:
    """Collective over all ranks: until nobody finds another bad sample.

    `own` says which samples of a batch are this rank's, `check` raises InvalidArgument for one it cannot use.
    """
    found: dict[str, Sample] = {}
    set_aside: list[UnusableSample] = []
    while True:
        facts = {sample.sample_id: sample for sample in samples}
        wanted = [sample_id for sample_id in own(samples) if sample_id not in found]
        read = [_checked(one, facts, check) for one in fetch(wanted)]
        found.update((one.sample_id, one) for one in read if isinstance(one, Sample))
        bad = _agreed([one for one in read if isinstance(one, UnusableSample)], layout)
        if not bad:
            return Readable(samples, found, set_aside)
        set_aside += bad.values()
        samples = [s.without(bad[s.sample_id].message) if s.sample_id in bad else s for s in samples]


def _checked(one: Read, facts: Mapping[str, SampleFacts], check: Callable[[Sample], None]) -> Read:
    if isinstance(one, UnusableSample):
        return one
    try:
        _check_facts(one, facts[one.sample_id])
        check(one)
    except InvalidArgument as error:
        return UnusableSample(one.sample_id, error.reason, error.message)
    return one


def _agreed(mine: Sequence[UnusableSample], layout: Layout) -> dict[str, UnusableSample]:
    """The bad samples of all ranks, by id; most steps have none, and that is one number to agree on."""
    for one in mine:
        log.error("sample_set_aside", sample_id=one.sample_id, reason=one.reason, message=one.message)
    count = torch.tensor([len(mine)], device=layout.device)
    dist.all_reduce(count)
    if not int(count):
        return {}
    rows = gathered([[one.sample_id, one.reason, one.message] for one in mine], layout)
    return {row[0]: UnusableSample(*row) for of_rank in rows for row in of_rank}


def all_readable(read: Sequence[Read]) -> list[Sample]:
    """Samples that were found readable before. Raises InvalidArgument for one that is not any more."""
    for one in read:
        if isinstance(one, UnusableSample):
            raise InvalidArgument(f"sample {one.sample_id} cannot be read now: {one.message}", reason=one.reason)
    return [one for one in read if isinstance(one, Sample)]


def _check_facts(sample: Sample, facts: SampleFacts) -> None:
    """The step was planned by the envelope of the batch."""
    lengths = (sample.prompt_length, sample.response_length, int(sample.loss_mask.sum()))
    if lengths != (facts.prompt_length, facts.response_length, facts.trained_tokens):
        raise InvalidArgument(
            f"sample {sample.sample_id} has {lengths[0]} prompt, {lengths[1]} response and {lengths[2]} trained "
            f"tokens, the batch says {facts.prompt_length}, {facts.response_length} and {facts.trained_tokens}"
        )


_SECONDS = 600.0
_AT_ONCE = 2
_OF_ONE_SAMPLE = (DataLoss, InvalidArgument, NotFound)
"""Errors that another sample does not share."""


class Fetch:
    """`fetch(sample_ids)` gives the samples in that order, each of them or why it cannot be read.

    Call it from any thread but the loop's own.
    What was begun before is only waited for. Two may be under way, a step's and the next one's; a third ends the first.
    """

    def __init__(self, buffer: TrainerBuffer, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        self._buffer = buffer
        self.stream = stream
        self._loop = loop
        self._begun: dict[tuple[str, ...], Future[list[Read]]] = {}

    def begin(self, sample_ids: Sequence[str]) -> None:
        """Fetches in the background: the compute thread goes on."""
        wanted = tuple(sample_ids)
        if not wanted or wanted in self._begun:
            return
        self._begun[wanted] = asyncio.run_coroutine_threadsafe(self._fetch(wanted), self._loop)
        if len(self._begun) > _AT_ONCE:
            self._begun.pop(next(iter(self._begun))).cancel()

    def __call__(self, sample_ids: Sequence[str]) -> list[Read]:
        if not sample_ids:
            return []
        self.begin(sample_ids)
        return self._begun.pop(tuple(sample_ids)).result(_SECONDS + 5.0)

    async def _fetch(self, sample_ids: Sequence[str]) -> list[Read]:
        """One sample that the ledger cannot give must not keep the others: then each half is asked for alone."""
        try:
            packed = await self._packed(sample_ids)
        except _OF_ONE_SAMPLE:
            if len(sample_ids) == 1:
                return [await self._again(sample_ids[0])]
            half = len(sample_ids) // 2
            return [*await self._fetch(sample_ids[:half]), *await self._fetch(sample_ids[half:])]
        return [await self._opened(sample_id, sample) for sample_id, sample in zip(sample_ids, packed, strict=True)]

    async def _opened(self, sample_id: str, packed: sample_pb2.Sample) -> Read:
        try:
            return Sample.unpack(packed)
        except HeadraceError:
            return await self._again(sample_id)

    async def _again(self, sample_id: str) -> Read:
        """The last word: what was damaged on its way comes whole the second time."""
        try:
            (packed,) = await self._packed([sample_id])
            return Sample.unpack(packed)
        except _OF_ONE_SAMPLE as error:
            return UnusableSample(sample_id, error.reason, error.message)

    async def _packed(self, sample_ids: Sequence[str]) -> Sequence[sample_pb2.Sample]:
        return await self._buffer.fetch_samples(self.stream, sample_ids, deadline_seconds=_SECONDS)


_GONE = "NOT_FOUND"


class SkippedSamples:
    """Appends to set_aside.jsonl: {"step", "sample_id", "reason", "message"}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._messages = _read(path)

    def applied(self, batch: Batch) -> Batch:
        known = self._messages
        samples = tuple(s.without(known[s.sample_id]) if s.sample_id in known else s for s in batch.samples)
        return replace(batch, samples=samples)

    def append(self, step: int, bad: Sequence[UnusableSample]) -> None:
        """Durable when it returns. What the ledger does not have is not written: it is asked again."""
        rows = [
            {"step": step, "sample_id": one.sample_id, "reason": one.reason, "message": one.message}
            for one in bad
            if one.reason != _GONE
        ]
        if rows:
            append_rows(self.path, rows)
            self._messages |= {str(row["sample_id"]): str(row["message"]) for row in rows}


def _read(path: Path) -> dict[str, str]:
    """Lines that a kill has cut are left out: their step was not trained."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [row for row in map(object_of_line, lines) if row]
    return {row["sample_id"]: row["message"] for row in rows}


class SamplesRead:
    """A `FetchSamples` that remembers the text of what it fetched, not the tokens."""

    def __init__(self, fetch: FetchSamples, step: int) -> None:
        self._fetch = fetch
        self._step = step
        self._answers: dict[str, Answer] = {}

    def __call__(self, sample_ids: Sequence[str]) -> Sequence[Read]:
        read = self._fetch(sample_ids)
        self._answers |= {one.sample_id: Answer.of(one, self._step) for one in read if isinstance(one, Sample)}
        return read

    def of(self, trained_ids: Sequence[str]) -> list[Answer]:
        """Returns the samples that this rank trained: a user's function may have been given more."""
        return [self._answers[sample_id] for sample_id in trained_ids]


class TrainedSamples:
    """Writes one data rank's share of each step, one step at a time."""

    def __init__(self, samples: SampleLog, rank: int, max_bytes: int) -> None:
        self._log = samples
        self._rank = rank
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def write(
        self, step: int, answers: Sequence[Answer], seen: Mapping[str, SeenTokens], shown: Collection[str]
    ) -> None:
        """Writes in the background, after the step before is written; `shown` samples token by token, too."""
        self.wait()
        self._writing = self._thread.submit(self._write, step, answers, seen, shown)

    def wait(self) -> None:
        """Returns once everything is written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(
        self, step: int, answers: Sequence[Answer], seen: Mapping[str, SeenTokens], shown: Collection[str]
    ) -> None:
        answers = [
            replace(answer, advantage=known.advantage, log_prob_gap=known.log_prob_gap)
            if (known := seen.get(answer.sample_id))
            else answer
            for answer in answers
        ]
        columns = [one.columns() for sample_id, one in seen.items() if sample_id in shown]
        try:
            written = self._log.write_step(step, self._rank, answers, self._max_bytes)
            self._log.write_tokens(step, self._rank, columns, self._max_bytes)
        except OSError as error:  # what people read later is no reason to end a training
            log.warning("samples_not_written", step=step, error=str(error))
            return
        if written < len(answers):
            log.warning("samples_cut", step=step, written=written, of=len(answers), sample_log_bytes=self._max_bytes)
