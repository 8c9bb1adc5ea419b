"""What Tinker's clients ask for, as plain values, and what they are answered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import InvalidArgument

Kind = Literal["weights", "sampler_weights"]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODEL = re.compile(r"[0-9a-f-]{36}:train:[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """`tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Raises InvalidArgument."""
        match text.removeprefix("tinker://").split("/"):
            case [model_id, ("weights" | "sampler_weights") as kind, name] if text.startswith("tinker://"):
                if _MODEL.fullmatch(model_id) and is_name(name):
                    return cls(model_id, kind, name)
        raise InvalidArgument(
            f"{text[:200]!r} is no path of a checkpoint: it has the form tinker://MODEL/weights/NAME or "
            "tinker://MODEL/sampler_weights/NAME",
            field="path",
        )

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and not text.startswith(".")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of N tokens, as bytes of little-endian arrays."""

    tokens: bytes
    """int32 [N], the model's input"""
    targets: bytes
    """int32 [N], the token whose log-prob is computed at each position"""
    columns: Mapping[str, bytes]
    """float32 [N] each, by the loss's names"""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Of one step: torch's AdamW. `grad_clip_norm` 0: gradients are not clipped."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True, slots=True)
class LossShare:
    """A data rank's part of a request."""

    log_probs: Mapping[int, bytes]
    """float32 [N] of each of its data, by number"""
    loss: float
    """The sum over its tokens"""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Without `backward` gradients stay as they are."""

    data: Sequence[Datum]
    loss_fn: str
    settings: Mapping[str, float]
    backward: bool


@dataclass(frozen=True, slots=True)
class Losses:
    """`log_probs`: float32 [N] of each datum, as bytes."""

    log_probs: Sequence[bytes]
    loss: float


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint of the model; `name` None: for a sampler of this session alone."""

    name: str | None
    for_sampler: bool
    sampler_seq: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    path: TinkerPath
    optimizer: bool


class Create:
    """Makes the model that the session has asked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: Sequence[int]
    num_samples: int
    sampling: Any
    """A SamplingParams message of headrace's protos"""
    prompt_log_probs: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """`log_probs`: float32; `is_stopped`: ended by a stop token or string, and not by its length."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    is_stopped: bool


Work = ForwardBackward | AdamParams | Save | Load | Create | Sample
