"""Every field of Megatron-core's configs, from fields.json, which tools/megatron_fields.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal  # noqa: F401  # the types in fields.json

from pydantic import Field, create_model

from headrace.job.schema.section import (
    FromJson,  # noqa: F401  # so is this
    Section,
)

_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
_FIELDS: Mapping[str, Mapping[str, Any]] = _TABLE["fields"]

VERSIONS: tuple[str, ...] = tuple(_TABLE["versions"])
"""The minor versions that these fields are from."""

ONLY_IN: Mapping[str, tuple[str, ...]] = {
    name: tuple(field["only_in"]) for name, field in _FIELDS.items() if "only_in" in field
}
"""Fields that not all of them have."""

OBJECTS = frozenset(name for name, field in _FIELDS.items() if field["type"] is None)
"""Fields that are Python objects, so that no flag can give them."""


def _annotation(field: Mapping[str, Any]) -> str:
    kind = field["type"] or "str"  # an object is refused by its name, whatever is given
    return f"Annotated[{kind}, FromJson] | None" if " | " in kind else f"{kind} | None"


def _default(field: Mapping[str, Any]) -> Any:
    return Field(None, description=f"{'; '.join(field['of'])}: {field['default']}.")


if TYPE_CHECKING:

    class MegatronFields(Section):
        # Those that headrace's own code reads.
        account_for_embedding_in_pipeline_split: bool | None = None
        account_for_loss_in_pipeline_split: bool | None = None
        moe_router_fusion: bool | None = None
        moe_router_load_balancing_type: str | tuple[str, ...] | None = None
        num_layers_in_first_pipeline_stage: int | None = None
        num_layers_in_last_pipeline_stage: int | None = None
        pipeline_model_parallel_layout: str | tuple[str, ...] | None = None
        recompute_granularity: Literal["full", "selective"] | None = None

else:
    MegatronFields = create_model(
        "MegatronFields",
        __base__=Section,
        __module__=__name__,
        __doc__="Megatron-core's fields. None means that nobody set it: Megatron's own default holds.",
        **{name: (_annotation(field), _default(field)) for name, field in _FIELDS.items()},
    )
