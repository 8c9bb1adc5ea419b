"""The only validator of a sample's values: for engines, hooks, teachers, scorers, the ledger and the trainer.

Every function takes a name and the value, and raises InvalidArgument with both. `Sample` calls them when it is
constructed; callers that know the model use `ModelBounds` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.models.architecture import Architecture

TOKENS = "tokens"
LOSS_MASK = "loss_mask"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
TEACHER_LOG_PROBS = "teacher_log_probs"
ROUTED_EXPERTS = "rollout_routed_experts"
"""Column int16 [T - 1, layers, experts of a token]: where engines sent each token but the last; -1 where unknown."""

COLUMN_DTYPES: Mapping[str, np.dtype[Any]] = {
    TOKENS: np.dtype("<i4"),
    LOSS_MASK: np.dtype("<u1"),
    ROLLOUT_LOG_PROBS: np.dtype("<f4"),
    TEACHER_LOG_PROBS: np.dtype("<f4"),
    ROUTED_EXPERTS: np.dtype("<i2"),
}
_largest, _smallest = np.maximum.reduce, np.minimum.reduce
"""The maximum and minimum of a flat array in half the time of `max` and `min`: every sample that is put passes here."""

_NUMBERS = (float, int, np.integer, np.floating)
MAX_REWARD = 1e6
LOG_PROB_SLACK = 1e-3
"""How far above 0 a log-probability may be: float32's x - logsumexp(x) of logits in the thousands rounds by that."""
MIN_LOG_PROB = -1e4
"""A token that was sampled has never had less: of float32 logits, probabilities below e^-10000 come of broken numbers,
and the importance ratio of such a token is infinite."""
MAX_INDEX = (1 << 32) - 1


def check_text(name: str, value: object) -> None:
    """Requires a str that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {_shown(value)}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} cannot be encoded as UTF-8: {error}") from error


def check_index(name: str, value: object) -> None:
    """Requires an integer that fits uint32."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INDEX:
        raise InvalidArgument(f"{name} is {_shown(value)}, must be an integer of 0 or more")


def check_reward(name: str, value: object) -> None:
    """Requires a finite number of at most MAX_REWARD in size."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise InvalidArgument(f"{name} is {_shown(value)}, must be a number")
    if not -MAX_REWARD <= value <= MAX_REWARD:  # nor is NaN
        raise InvalidArgument(f"{name} is {_shown(value)}, must be finite and at most {MAX_REWARD:g} in size")


def check_row(name: str, values: object, length: int | None = None) -> None:
    """Requires a one-dimensional array of the column's dtype, and of `length` if it is given."""
    column = name.rpartition(" ")[2]
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = list(values.shape) if isinstance(values, np.ndarray) else type(values).__name__
        raise InvalidArgument(f"{name} is {shape}, must be one row of {COLUMN_DTYPES[column]}")
    if values.dtype != COLUMN_DTYPES[column]:
        raise InvalidArgument(f"{name} has dtype {values.dtype}, must have {COLUMN_DTYPES[column]}")
    if length is not None and len(values) != length:
        raise InvalidArgument(f"{name} has {len(values)} entries, must have {length}: one for each response token")


def check_loss_mask(name: str, mask: NDArray[Any]) -> None:
    """Requires 0 or 1 everywhere."""
    if len(mask) and _largest(mask) > 1:
        raise InvalidArgument(f"{name}{_place(mask > 1)} is {mask.max()}, must be 0 or 1")


def check_log_probs(name: str, values: NDArray[Any]) -> None:
    """Requires natural logarithms of probabilities: not above 0, and not below MIN_LOG_PROB."""
    if not len(values):
        return
    largest = _largest(values)  # NaN where there is one
    if largest <= LOG_PROB_SLACK and _smallest(values) >= MIN_LOG_PROB:
        return
    wrong = ~((values >= MIN_LOG_PROB) & (values <= LOG_PROB_SLACK))
    raise InvalidArgument(f"{name}{_place(wrong)} is {values[wrong][0]}, must be {MIN_LOG_PROB:g} to 0")


def check_token_ids(name: str, tokens: NDArray[Any], vocab_size: int | None = None) -> None:
    """Requires ids of a vocabulary; of `vocab_size` if it is known."""
    if not len(tokens):
        return
    end = vocab_size if vocab_size is not None else 1 << 31
    if _smallest(tokens) >= 0 and _largest(tokens) < end:
        return
    wrong = (tokens < 0) | (tokens >= end)
    raise InvalidArgument(f"{name}{_place(wrong)} is {tokens[wrong][0]}, not an id of a vocabulary of {end}")


def check_experts(name: str, experts: object, num_tokens: int) -> None:
    """Requires int16 [num_tokens - 1, layers, experts of a token], -1 where unknown."""
    dtype = COLUMN_DTYPES[ROUTED_EXPERTS]
    if not isinstance(experts, np.ndarray) or experts.dtype != dtype or experts.ndim != 3:
        raise InvalidArgument(f"{name} is {_shown_array(experts)}, must be {dtype} [tokens - 1, layers, top-k]")
    if len(experts) != max(num_tokens - 1, 0):
        raise InvalidArgument(f"{name} has {len(experts)} tokens, must have {num_tokens - 1}: all but the last")
    if experts.size and experts.min() < -1:
        raise InvalidArgument(f"{name} has {experts.min()}, must be an expert's number, or -1 for unknown")


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Limits that a model sets for token ids and routed experts."""

    vocab_size: int
    num_layers: int
    num_experts: int | None = None
    experts_per_token: int | None = None

    @classmethod
    def of(cls, architecture: Architecture) -> ModelBounds:
        experts = architecture.experts
        return cls(
            architecture.vocab_size,
            architecture.num_layers,
            experts.count if experts else None,
            experts.topk if experts else None,
        )

    def check(self, sample_id: str, tokens: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> None:
        """Raises InvalidArgument for token ids and experts that the model does not have."""
        check_token_ids(f"sample {sample_id}: {TOKENS}", tokens, self.vocab_size)
        experts = columns.get(ROUTED_EXPERTS)
        if experts is None or self.num_experts is None:
            return
        name = f"sample {sample_id}: {ROUTED_EXPERTS}"
        if experts.shape[1:] != (self.num_layers, self.experts_per_token):
            raise InvalidArgument(
                f"{name} is {list(experts.shape)}, must be {[len(tokens) - 1, self.num_layers, self.experts_per_token]}"
            )
        if experts.size and experts.max() >= self.num_experts:
            raise InvalidArgument(f"{name} has expert {experts.max()}, the model has {self.num_experts} experts")


def _place(wrong: NDArray[Any]) -> str:
    return f"[{int(np.flatnonzero(wrong)[0])}]"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    return text[:80]


def _shown_array(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
