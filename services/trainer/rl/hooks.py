"""User functions inside the trainer, with slime's arguments. They run in the rank's compute thread, on its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.trainer import trainer_hook
from headrace.trajectory import Sample, Status
from services.trainer.rl.inputs import MicroInputs


class RolloutData(dict[str, Any]):
    """slime's `rollout_data`: a list a key, one entry a sample of this rank; per-token entries are tensors [R]."""

    @classmethod
    def of(cls, micros: Sequence[MicroInputs]) -> RolloutData:
        """The data of these micro-batches, as far as it is known before advantages are."""
        samples = [sample for micro in micros for sample in micro.samples]
        data = cls(of_samples(samples))
        data["rewards"] = [reward for micro in micros for reward in micro.rewards]
        data["loss_masks"] = _cut(micros, "mask")
        data["rollout_log_probs"] = _cut(micros, "rollout_log_probs")
        return data

    def per_token(self, key: str, micros: Sequence[MicroInputs]) -> list[Tensor]:
        """The hook's tensors under `key`. Raises InvalidArgument unless it is one finite tensor [R] a sample."""
        lengths = [sample.response_length for micro in micros for sample in micro.samples]
        return per_token(f"rollout_data[{key!r}]", self.get(key), lengths)


def per_token(name: str, found: Any, lengths: Sequence[int]) -> list[Tensor]:
    """A hook's value for each sample. Raises InvalidArgument unless it is one finite tensor [R] a sample."""
    if not isinstance(found, list | tuple) or len(found) != len(lengths):
        raise InvalidArgument(f"the hook must give {name} as a list of {len(lengths)} tensors")
    for index, (tensor, length) in enumerate(zip(found, lengths, strict=True)):
        if not isinstance(tensor, Tensor) or tensor.shape != (length,):
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(f"{name}[{index}] is {shape}, must be {[length]}")
        if not torch.isfinite(tensor).all():
            raise InvalidArgument(f"{name}[{index}] is not finite")
    return [tensor.float() for tensor in found]


def of_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples' own data as hooks see them; `metadata` is train_metadata, as in slime."""
    return {
        "tokens": [torch.from_numpy(s.tokens.astype("int64")) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "raw_reward": [s.reward for s in samples],
        "truncated": [int(s.status is Status.TRUNCATED) for s in samples],
        "sample_indices": [s.sample_id for s in samples],
        "rollout_ids": [s.rollout_id or s.sample_id for s in samples],
        "metadata": [dict(s.train_metadata) for s in samples],
        "sample_metadata": [dict(s.metadata) for s in samples],
    }


def changed_by(hook: Callable[[RolloutData], None], micros: Sequence[MicroInputs]) -> list[MicroInputs]:
    """The micro-batches with the advantages and returns that a function of the rollout's data left."""
    data = RolloutData.of(micros)
    data["advantages"], data["returns"] = _cut(micros, "advantages"), _cut(micros, "returns")
    hook(data)
    return put_back(micros, data.per_token("advantages", micros), data.per_token("returns", micros))


def put_back(
    micros: Sequence[MicroInputs], advantages: Sequence[Tensor], returns: Sequence[Tensor]
) -> list[MicroInputs]:
    """The micro-batches with the advantages and returns of their samples, one tensor a sample, in order."""
    found, start = [], 0
    for micro in micros:
        end = start + len(micro.samples)
        found.append(replace(micro, advantages=micro.put(advantages[start:end]), returns=micro.put(returns[start:end])))
        start = end
    return found


def bound(path: str | None, kind: str, args: HookArgs) -> Callable[..., Any] | None:
    """A user's function with its first argument, `args`; None without one."""
    return None if path is None else partial(trainer_hook(path, kind).target, args)


def _cut(micros: Sequence[MicroInputs], name: str) -> list[Tensor]:
    return [part for micro in micros for part in micro.copies(getattr(micro, name))]
