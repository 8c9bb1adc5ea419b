"""Carries out rank 0's commands. Runs in the rank's compute thread, never on its event loop.

Every rank runs the same commands in one order. A command is a method of the worker that is marked; its name and its
arguments travel as MessagePack, typed by its signature, and nothing else is carried out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control.senders import Compared, Probed, Sender, Sent, StageGroup, StageWeights
from services.trainer.data.samples import Fetch, SamplesRead, TrainedSamples, UnusableSample
from services.trainer.model.policy import Policy
from services.trainer.model.profile import StepProfiler
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.seen_tokens import shown_ids

Method = TypeVar("Method", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Trained:
    metrics: dict[str, float]
    set_aside: Sequence[UnusableSample]
    is_logged: bool = False
    """A user's function has logged the rollout: trackers are not given its figures as well."""


def command(method: Method) -> Method:
    """Lets rank 0 ask for the method."""
    vars(method)["is_command"] = True
    return method


@dataclass
class RankWorker:
    """One rank's share of the trainer: its part of the policy, of the samples and of the sending.

    An error of a command ends the rank, and with it the trainer. A HeadraceError of `save` or `export` does not: it is
    raised on all ranks alike (`CollectiveIO`), and they can go on.
    """

    policy: Policy
    sender: Sender
    fetch: Fetch
    checkpoints: Checkpoints
    trained_samples: TrainedSamples | None
    """None on ranks that know no samples of their own, and where the job wants none written"""
    profiler: StepProfiler | None = None
    _scored_by: Counter[str] = field(default_factory=Counter, init=False)
    """The samples since the last checkpoint, by the scorers that paid for them."""

    @command
    def train(self, step: int, samples: Sequence[SampleFacts]) -> Trained:
        read = None if self.trained_samples is None else SamplesRead(self.fetch, step + 1)
        with self.profiler.step(step + 1) if self.profiler else nullcontext():
            metrics = self.policy.train(step, samples, read or self.fetch)
        if self.trained_samples is not None and read is not None:
            seen = {} if self.policy.pipeline.record is None else self.policy.pipeline.record.take()
            self.trained_samples.write(step + 1, read.of(self.policy.trained_ids), seen, shown_ids(step, samples))
        self._scored_by.update(sample.scored_by for sample in samples if sample.scored_by and not sample.set_aside)
        return Trained(metrics, self.policy.set_aside, self.policy.is_logged)

    @command
    def prefetch(self, samples: Sequence[SampleFacts]) -> None:
        self.fetch.begin(self.policy.batches.own_sample_ids(samples))

    @command
    def describe_weights(self) -> StageWeights | None:
        return self.sender.describe()

    @command
    def open_group(self, service: int) -> StageGroup | None:
        """Listens for this stage's group of a rollout service's engines; a group that lives on is kept."""
        return self.sender.open(service)

    @command
    def probe(self) -> Probed | None:
        return self.sender.probe()

    @command
    def send_weights(self, publication_id: str, world_sizes: Mapping[int, int], kept: bool = False) -> Sent | None:
        """Joins the groups and broadcasts the buckets, of the current weights or of those that were kept."""
        return self.sender.send(publication_id, world_sizes, kept=kept)

    @command
    def compare_weights(self) -> Compared | None:
        return self.sender.compare()

    @command
    def send_delta(self, publication_id: str, world_sizes: Mapping[int, int]) -> Sent | None:
        return self.sender.send_delta(publication_id, world_sizes)

    @command
    def hash_weights(self) -> Sent | None:
        return self.sender.hashed()

    @command
    def keep_weights(self) -> None:
        self.sender.keep()

    @command
    def drop_groups(self, services: Sequence[int]) -> None:
        self.sender.drop(services)

    @command
    def to_host(self) -> None:
        self.policy.memory.to_host()

    @command
    def to_device(self) -> None:
        self.policy.memory.to_device()

    @command
    def save(self, step: int, policy_version: int, epoch: int) -> None:
        self._wait_for_samples()
        self.checkpoints.save(
            self.policy.saved, step=step, policy_version=policy_version, epoch=epoch, scored_by=dict(self._scored_by)
        )
        self._scored_by.clear()

    @command
    def export(self, path: str) -> None:
        self.policy.export(Path(path))

    @command
    def leave(self) -> None:
        """The end of the run: returns once this rank's files are written."""
        self._wait_for_samples()
        self.checkpoints.wait()

    def _wait_for_samples(self) -> None:
        if self.trained_samples is not None:
            self.trained_samples.wait()


class Command:
    """A command's arguments and result as MessagePack."""

    def __init__(self, method: Callable[..., object]) -> None:
        types = get_type_hints(method)
        result: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(types.pop("return"))
        parameters = inspect.signature(method).parameters
        fields = [
            (name, kind) if (default := parameters[name].default) is inspect.Parameter.empty else (name, kind, default)
            for name, kind in types.items()
        ]
        self._arguments = msgspec.defstruct(method.__name__, fields, array_like=True)
        self._decoder = msgspec.msgpack.Decoder(self._arguments)
        self.result_of = result.decode

    def pack(self, args: Sequence[object], kwargs: Mapping[str, object]) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(self._arguments(*args, **kwargs)))

    def unpack(self, arguments: msgspec.Raw) -> tuple[Any, ...]:
        """Raises msgspec.MsgspecError for what are none."""
        return msgspec.structs.astuple(self._decoder.decode(arguments))


@cache
def commands(worker: type) -> Mapping[str, Command]:
    return {name: Command(method) for name, method in vars(worker).items() if hasattr(method, "is_command")}
