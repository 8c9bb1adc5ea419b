"""A group of engines with arguments of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from headrace.job.schema.section import Positive, Section
from headrace.job.schema.sound import plain


class EngineGroup(Section):
    """A job says either `num_engines` or `num_gpus`; once it is resolved, both and all else is there."""

    name: str = Field("", max_length=64)
    worker_type: Literal["regular", "prefill", "decode", "placeholder"] = "regular"
    num_engines: Positive | None = None
    num_gpus: Positive | None = None
    num_gpus_per_engine: Positive | None = None
    overrides: Annotated[dict[str, Any], AfterValidator(plain)] = Field({})
    """Arguments of SGLang's, by its names, over those of the job."""

    @property
    def count(self) -> int:
        """The engines of a resolved group."""
        assert self.num_engines is not None, "the group is not resolved"
        return self.num_engines

    @property
    def size(self) -> int:
        """The tensor-parallel size of a resolved group's engines."""
        assert self.num_gpus_per_engine is not None, "the group is not resolved"
        return self.num_gpus_per_engine
