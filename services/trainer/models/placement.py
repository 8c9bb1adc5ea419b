"""Which rows of a table belong to this rank's part of a model, under which names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_model import GPTModel

from headrace.config.architecture import Architecture
from headrace.models.registry import table
from headrace.models.rows import Row
from services.trainer.parallel import Layout


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of this pipeline stage."""

    row: Row
    name: str
    """The Megatron parameter; of another rank's expert, the one in the same place here."""
    owner: int
    """The expert rank that holds it; 0 for what all hold."""


def placed_rows(architecture: Architecture, layout: Layout, model: GPTModel) -> Iterator[Placed]:
    """This stage's rows. With tied embeddings the last stage's copy has none."""
    rows = table(architecture)
    if model.pre_process:
        yield from (Placed(row, row.megatron, 0) for row in rows.first)
    for local, layer in enumerate(model.decoder.layers):
        for row in rows.layer(layer.layer_number - 1):
            yield _in_layer(row, f"decoder.layers.{local}.", architecture, layout)
    if model.post_process:
        yield from (Placed(row, row.megatron, 0) for row in rows.last)


def _in_layer(row: Row, prefix: str, architecture: Architecture, layout: Layout) -> Placed:
    if row.expert is None or architecture.experts is None:
        return Placed(row, prefix + row.megatron, 0)
    owner, local = divmod(row.expert, architecture.experts.count // layout.ep_size)
    return Placed(row, prefix + row.megatron.format(expert=local), owner)
