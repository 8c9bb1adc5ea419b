"""The samples of a step, read. What cannot be read or used is set aside, by the same decision on every rank.

A sample that ended the step would end every start of the trainer: the same batch comes back. So each rank reads its
own samples, all hear which of them are bad, and the step is planned again without those, until nobody finds another.
The decision follows from the sample's bytes. What may follow from something else (a damaged transfer) is written down
by `SetAside`, so that a step that is run again sets the same samples aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.errors import InvalidArgument
from headrace.rpc.log import log
from headrace.trajectory import Sample
from services.trainer.megatron.gathered import gathered
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.batch import SampleFacts


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
    """The samples of a step that were read."""

    samples: Sequence[SampleFacts]
    """All of the batch, equal on all ranks; bad ones are FAILED."""
    own: Mapping[str, Sample]
    """This rank's, by id."""
    set_aside: Sequence[UnusableSample]
    """Found bad now, equal on all ranks."""


class SampleReader:
    """`own` says which samples of a batch are this rank's, `check` raises InvalidArgument for one it cannot use."""

    def __init__(
        self, own: Callable[[Sequence[SampleFacts]], Sequence[str]], check: Callable[[Sample], None], layout: Layout
    ) -> None:
        self._own = own
        self._check = check
        self._layout = layout

    def read(self, samples: Sequence[SampleFacts], fetch: FetchSamples) -> Readable:
        """Collective over all ranks."""
        found: dict[str, Sample] = {}
        set_aside: list[UnusableSample] = []
        while True:
            bad = self._agreed(self._read_own(samples, fetch, found))
            if not bad:
                return Readable(samples, found, set_aside)
            set_aside += bad.values()
            samples = [s.without(bad[s.sample_id].message) if s.sample_id in bad else s for s in samples]

    def _read_own(
        self, samples: Sequence[SampleFacts], fetch: FetchSamples, found: dict[str, Sample]
    ) -> list[UnusableSample]:
        """Returns the bad samples; puts the others into `found`."""
        facts = {sample.sample_id: sample for sample in samples}
        wanted = [sample_id for sample_id in self._own(samples) if sample_id not in found]
        read = [self._used(one, facts) for one in fetch(wanted)]
        found.update((one.sample_id, one) for one in read if isinstance(one, Sample))
        return [one for one in read if isinstance(one, UnusableSample)]

    def _used(self, one: Read, facts: Mapping[str, SampleFacts]) -> Read:
        if isinstance(one, UnusableSample):
            return one
        try:
            _check_facts(one, facts[one.sample_id])
            self._check(one)
        except InvalidArgument as error:
            return UnusableSample(one.sample_id, error.reason, error.message)
        return one

    def _agreed(self, mine: Sequence[UnusableSample]) -> dict[str, UnusableSample]:
        """The bad samples of all ranks, by id; most steps have none, and that is one number to agree on."""
        for one in mine:
            log.error("sample_set_aside", sample_id=one.sample_id, reason=one.reason, message=one.message)
        count = torch.tensor([len(mine)], device=self._layout.device)
        dist.all_reduce(count)
        if not int(count):
            return {}
        rows = gathered([[one.sample_id, one.reason, one.message] for one in mine], self._layout)
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
