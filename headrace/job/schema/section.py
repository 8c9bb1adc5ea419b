"""The frozen base class of a job's sections, and the ranges of their numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from headrace.job.schema.sound import sound
from headrace.wire.limits import LAST_PORT, MAX_COUNTER, MAX_LEASE_SECONDS

_LEAST_TEMPERATURE = 1e-3


def _not_nearly_zero(value: float) -> float:
    """Refuses tiny temperatures, because logits are divided by them in float32."""
    if 0 < value < _LEAST_TEMPERATURE:
        raise ValueError(f"should be 0, which is greedy, or at least {_LEAST_TEMPERATURE:g}")
    return value


_MAX_INT32 = (1 << 31) - 1

Positive = Annotated[int, Field(gt=0, le=_MAX_INT32)]
NonNegative = Annotated[int, Field(ge=0, le=_MAX_INT32)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Port = Annotated[int, Field(gt=0, le=LAST_PORT)]
Bytes = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
Seconds = Annotated[float, Field(ge=1e-3, le=MAX_LEASE_SECONDS)]
Share = Annotated[float, Field(gt=0, le=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Coefficient = Annotated[float, Field(ge=0, le=1e4)]
"""The weight of a term in a loss or a reward."""
Score = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A reward."""
Rate = Annotated[float, Field(ge=0, le=100)]
"""A learning rate, a weight decay."""
Temperature = Annotated[float, Field(ge=0, le=1e3), AfterValidator(_not_nearly_zero)]


class Section(BaseModel):
    """Frozen. Refuses unknown keys, and values that could not be written to a file or computed with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _sound(cls, value: Any) -> Any:
        return sound(value)
