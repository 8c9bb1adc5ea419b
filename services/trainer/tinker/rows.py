"""Lays data into micro-batches. Neighbours that begin alike, as the samples of a group do, share that beginning.

Log-probs are wanted at every position of every datum, also where the model computes a position once for several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.trajectory import Sample, Status
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.planning import MicroBatch
from services.trainer.plan.rows import Packing, pack
from services.trainer.rl.inputs import MicroInputs, inference_inputs
from services.trainer.tinker.work import Datum

_LEAST_SHARED = 8
"""Tokens of a beginning that are worth it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A datum of a request by its number; the first `shared` of its tokens are those of its family."""

    number: int
    family: int
    shared: int


def micro_batches(
    data: Sequence[Datum], rank: int, ranks: int, max_tokens: int, *, shares: bool
) -> list[Sequence[Row]]:
    """A data rank's part of the request: families one after the other, and a micro-batch is full at `max_tokens`.

    A datum with more tokens is alone.
    """
    found: list[list[Row]] = []
    filled = max_tokens
    for rows in _families(data, range(rank, len(data), ranks), shares=shares):
        for first, row in enumerate(rows):
            new = data[row.number].num_tokens - (row.shared if first else 0)
            if filled + new > max_tokens:
                found.append([])
                filled, new = 0, data[row.number].num_tokens
            found[-1].append(row)
            filled += new
    return list(found)


def _families(data: Sequence[Datum], numbers: Sequence[int], *, shares: bool) -> list[list[Row]]:
    families: list[list[int]] = []
    shared: list[int] = []
    for number in numbers:
        common = _common(data[families[-1][0]], data[number]) if families and shares else 0
        common = min([common, *shared[-1:]])
        if common >= max(_LEAST_SHARED, (shared[-1] if shared and len(families[-1]) > 1 else 0) // 2):
            families[-1].append(number)
            shared[-1] = common
        else:
            families.append([number])
            shared.append(data[number].num_tokens)
    return [
        [Row(number, family, size if len(members) > 1 else 1) for number in members]
        for family, (members, size) in enumerate(zip(families, shared, strict=True))
    ]


def _common(one: Datum, other: Datum) -> int:
    first, second = _tokens(one), _tokens(other)
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def _tokens(datum: Datum) -> NDArray[np.int32]:
    return np.frombuffer(datum.tokens, dtype="<i4")


def inputs_of(data: Sequence[Datum], rows: Sequence[Row], packing: Packing, layout: Layout) -> MicroInputs:
    """The micro-batch: [n, S] for n data of at most S tokens, in the order of the rows."""
    samples = [_sample(data[row.number], row) for row in rows]
    packed = pack(samples, packing)
    sizes = [data[row.number].num_tokens for row in rows]
    shape = (len(rows), max(sizes))
    positions = [_positions(row, at) for row, at in zip(rows, packed.logit_positions, strict=True)]
    micro = MicroBatch(
        samples=tuple(samples),
        rows=packed.rows,
        logit_positions=torch.from_numpy(np.concatenate(positions)),
        target_slots=torch.cat([torch.arange(size) + index * shape[1] for index, size in enumerate(sizes)]),
        targets=_filled(shape, [np.frombuffer(data[row.number].targets, dtype="<i4") for row in rows]).long(),
        loss_mask=_filled(shape, [np.ones(size, dtype=np.float32) for size in sizes]).to(torch.uint8),
        rollout_log_probs=torch.zeros(shape),
        sample_numbers=packed.sample_numbers,
    )
    return inference_inputs(micro, layout)


def columns_of(
    data: Sequence[Datum], rows: Sequence[Row], names: Sequence[str], micro: MicroInputs
) -> Mapping[str, Tensor]:
    """float32 [n, S] each, 0 where a row has no token."""
    return {
        name: _filled(
            micro.targets.shape, [np.frombuffer(data[row.number].columns[name], dtype="<f4") for row in rows]
        ).to(micro.targets.device, torch.float32)
        for name in names
    }


def _positions(row: Row, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of all tokens of a datum in the flattened rows; `at`: of the last shared one, and of those behind it."""
    return np.concatenate([at[0] - np.arange(row.shared)[::-1], at[1:]])


def _filled(shape: Sequence[int], parts: Sequence[NDArray[np.generic]]) -> Tensor:
    whole = np.zeros(tuple(shape), dtype=np.float64)
    for index, part in enumerate(parts):
        whole[index, : len(part)] = part
    return torch.from_numpy(whole)


def _sample(datum: Datum, row: Row) -> Sample:
    """What is behind the shared beginning is its response, and one token more, which is in no row."""
    size = datum.num_tokens - row.shared + 1
    return Sample(
        sample_id=str(row.number),
        group_id=str(row.family),
        index=0,
        prompt="",
        response="",
        tokens=np.append(_tokens(datum), np.int32(0)),
        loss_mask=np.ones(size, dtype=np.uint8),
        rollout_log_probs=np.zeros(size, dtype=np.float32),
        status=Status.COMPLETED,
    )
