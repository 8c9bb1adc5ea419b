"""Generated groups on their way to a data source, and those that come back from it to be trained once more.

Every sample that a class is given remembers its group, in its copies too: a group comes back whole, whichever of its
samples was chosen, with the tokens, log-probs and policy versions that it was generated with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import from_hook, plain, to_hook
from headrace.hooks.reward import checked_reward
from headrace.hooks.sample import Sample
from headrace.trajectory import Sample as WireSample

_ORIGIN = "_origin_and_place"


@dataclass(frozen=True)
class Generated:
    """A group of the ledger; `prompt` and `samples` are serialized."""

    group_id: str
    prompt: bytes
    samples: list[bytes]


@dataclass(frozen=True)
class ReuseRequest:
    """Asks for at most `count` groups to be trained once more, at `step`."""

    step: int
    oldest: int | None
    """The oldest policy version that the step may train: what is older leaves the buffer."""
    count: int
    n_samples: int
    """The number of samples of a group."""
    too_early: list[str]
    """Groups that may not be chosen yet."""


@dataclass(frozen=True)
class ReusedGroup:
    """A finished group to be trained: one that was generated here before, or one that the class brings itself."""

    group_id: str
    """Empty for one that it brings itself; so are `prompt` and `times`."""
    prompt: bytes
    times: int
    samples: list[bytes]
    first: Sample
    """Has the prompt of a group that it brings itself."""


@dataclass(eq=False)
class SourceGroup:
    """The group of a sample in the hands of the user's class."""

    generated: Generated
    wire: list[WireSample]
    samples: list[Sample] = field(default_factory=list)
    times: int = 0

    @classmethod
    def of_generated(cls, generated: Generated, group_index: int) -> SourceGroup:
        wire = [WireSample.unpack(sample_pb2.Sample.FromString(packed)) for packed in generated.samples]
        origin = cls(generated, wire)
        origin.samples = [to_hook(sample, group_index) for sample in wire]
        for place, sample in enumerate(origin.samples):
            setattr(sample, _ORIGIN, (origin, place))
        return origin

    @property
    def group_id(self) -> str:
        return self.generated.group_id

    @property
    def oldest_version(self) -> int | None:
        """The version behind the oldest of its trained tokens; None when no policy sampled any."""
        return min((r.policy_version for s in self.wire for r in s.policy_ranges if not r.masked), default=None)


def origin_of(each: Sample | list[Sample]) -> SourceGroup | None:
    """The origin of a sample or of a group; None for what was not generated here."""
    sample = each[0] if isinstance(each, list) and each else each
    origin, _ = getattr(sample, _ORIGIN, (None, 0))
    return origin


def is_finished(each: Sample | list[Sample]) -> bool:
    """True for a sample, or a group, that was generated already."""
    return all(s.status is not Sample.Status.PENDING for s in (each if isinstance(each, list) else [each]))


def groups_of(path: str, chosen: Iterable[Any]) -> list[list[Sample]]:
    """Samples, or groups of them, as whole groups in their order. Raises InvalidArgument for anything else."""
    groups: dict[object, list[Sample]] = {}
    for place, each in enumerate(chosen):
        strangers = {type(one).__name__ for one in (each if isinstance(each, list) else [each])} - {"Sample"}
        first = each[0] if isinstance(each, list) and each else each
        if strangers or not isinstance(first, Sample):
            raise InvalidArgument(
                f"hook {path} returned a list of {sorted(strangers) or ['empty lists']}; it must hold Samples, "
                "or groups of them"
            )
        origin = origin_of(first)
        if origin:
            groups.setdefault(origin.group_id, _current(each, origin))
        elif isinstance(each, list):
            groups[place, "group"] = each
        elif first.group_index is not None and is_finished(first):
            groups.setdefault((first.group_index, "index"), []).append(first)
        else:
            groups[place, "sample"] = [first]
    return list(groups.values())


def again(path: str, args: HookArgs, group: Sequence[Sample]) -> ReusedGroup:
    """Raises InvalidArgument for what cannot be trained, naming the field."""
    origin = origin_of(group[0])
    if origin is None:
        wire = [_brought(path, args, sample, number) for number, sample in enumerate(group)]
        return ReusedGroup("", b"", 0, [sample.pack().SerializeToString() for sample in wire], plain(group[0]))
    origin.times += 1
    samples = [_changed(path, args, one, wire) for one, wire in zip(group, origin.wire, strict=True)]
    packed = [sample.pack().SerializeToString() for sample in samples]
    return ReusedGroup(origin.group_id, origin.generated.prompt, origin.times, packed, Sample())


def _current(each: Sample | list[Sample], origin: SourceGroup) -> list[Sample]:
    """The whole group, with the copies that were returned in the place of the samples that they were made of."""
    samples = list(origin.samples)
    for sample in each if isinstance(each, list) else [each]:
        of, place = getattr(sample, _ORIGIN, (None, 0))
        if of is origin:
            samples[place] = sample
    return samples


def _changed(path: str, args: HookArgs, sample: Sample, wire: WireSample) -> WireSample:
    """Returns the generated sample with what a data source may set: reward, metadata and remove_sample."""
    mask = np.zeros_like(wire.loss_mask) if sample.remove_sample else wire.loss_mask
    changes: dict[str, Any] = {"metadata": sample.metadata, "loss_mask": mask}
    if sample.reward != (dict(wire.reward_parts) or wire.reward):
        changes |= _scored(path, args, sample)
    return dataclasses.replace(wire, **changes)


def _brought(path: str, args: HookArgs, sample: Sample, number: int) -> WireSample:
    name = f"{path}#{sample.group_index}/{number}"
    if sample.status is not Sample.Status.FAILED and not sample.weight_versions:
        raise InvalidArgument(
            f"hook {path} brought a finished sample without weight_versions: say which policy version sampled it, "
            "as ['0'] for the weights of --hf-checkpoint, or leave its status PENDING to have it generated"
        )
    wire = from_hook(plain(sample), sample_id=name, group_id=path, index=number)
    return dataclasses.replace(wire, **_scored(path, args, sample)) if sample.reward is not None else wire


def _scored(path: str, args: HookArgs, sample: Sample) -> dict[str, Any]:
    if sample.reward is None:
        return {"reward": None, "reward_parts": {}}
    reward = checked_reward(path, sample.reward)
    if isinstance(reward, str):
        raise InvalidArgument(f"sample.reward: {reward}")
    value = dataclasses.replace(sample, reward=reward).get_reward_value(args)
    return {"reward": value, "reward_parts": reward if isinstance(reward, dict) else {}}
