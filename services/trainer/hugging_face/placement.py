"""The rows of a table that belong to this rank's part of a model, with their names there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_model import GPTModel

from headrace.models.architecture import Architecture
from headrace.models.registry import table
from headrace.models.rows import Row
from services.trainer.megatron.parallel import Layout


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of this pipeline rank."""

    row: Row
    name: str
    """The parameter as weights.py names it; of another rank's expert, the one in the same place here."""
    owner: int
    """The expert rank that holds it; 0 for what all hold."""


def placed_rows(architecture: Architecture, layout: Layout, chunks: Sequence[GPTModel]) -> Iterator[Placed]:
    """This rank's rows, of one virtual stage after the other. With tied embeddings the last one's copy has none."""
    rows = table(architecture)
    for number, chunk in enumerate(chunks):
        if chunk.pre_process:
            yield from (Placed(row, f"{number}.{row.megatron}", 0) for row in rows.first)
        for local, layer in enumerate(chunk.decoder.layers):
            for row in rows.layer(layer.layer_number - 1):
                yield _in_layer(row, f"{number}.decoder.layers.{local}.", architecture, layout)
        if chunk.post_process:
            yield from (Placed(row, f"{number}.{row.megatron}", 0) for row in rows.last)


def _in_layer(row: Row, prefix: str, architecture: Architecture, layout: Layout) -> Placed:
    if row.expert is None or architecture.experts is None:
        return Placed(row, prefix + row.megatron, 0)
    owner, local = divmod(row.expert, architecture.experts.count // layout.ep_size)
    return Placed(row, prefix + row.megatron.format(expert=local), owner)
