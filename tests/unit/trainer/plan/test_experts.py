"""What the engines chose, read from the samples into the order of the rows; and what a router makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.models.architecture import Experts
from headrace.trajectory import ROUTED_EXPERTS, Sample
from services.trainer.megatron.routing_replay import RouterOfLayer, RoutingReplay
from services.trainer.plan.planning import collate
from services.trainer.plan.rows import ExpertChoices, Packing, RolloutChoices
from tests.support.ranks.algorithm_cases import told

EXPERTS = Experts(4, 48, 2, (), None, "softmax", True, None, False, False, None, None)
CHOICES = RolloutChoices(2, EXPERTS)


@pytest.mark.parametrize("packing", ["padded", "packed", "shared_prompts"])
def test_every_position_has_the_choice_of_its_own_token(packing: Packing) -> None:
    samples = told(0)
    micro = collate(samples, packing)
    found = CHOICES.of(micro.samples, micro.sample_numbers, micro.rows)
    rows, size = micro.rows.tokens.shape
    seen = set()
    for row in range(rows):
        for column in range(size):
            number, position = int(micro.sample_numbers[row, column]), int(micro.rows.positions[row, column])
            mine = [found.by_layer[layer][column * rows + row].tolist() for layer in (0, 1)]
            if number < 0:
                assert mine == [[-1, -1], [-1, -1]]
                continue
            assert micro.rows.tokens[row, column] == samples[number].tokens[position]
            assert mine == samples[number].columns[ROUTED_EXPERTS][position].tolist()
            seen.add((number, position))
    of_responses = {(n, p) for n, s in enumerate(samples) for p in range(s.prompt_length, len(s.tokens) - 1)}
    assert of_responses <= seen


def test_dense_layers_are_not_asked() -> None:
    choices = RolloutChoices(2, replace(EXPERTS, dense_layers=(0,)))
    sample = _with(told(0)[0], layer=0, value=0)
    micro = collate([sample], "padded")
    assert list(choices.of(micro.samples, micro.sample_numbers, micro.rows).by_layer) == [1]


@pytest.mark.parametrize(
    ("value", "message"), [(4, r"token 2, layer 1 is \[4, 4\], not 2 of the model's 4 experts"), (0, r"is \[0, 0\]")]
)
def test_choices_that_are_not_this_models_are_refused(value: int, message: str) -> None:
    micro = collate([_with(told(0)[0], layer=1, value=value)], "padded")
    with pytest.raises(InvalidArgument, match=message):
        CHOICES.of(micro.samples, micro.sample_numbers, micro.rows)


def test_a_router_follows_what_it_wrote_down_and_keeps_its_gradient() -> None:
    replay, choices = RoutingReplay([], tp_rank=0), ExpertChoices()
    router = RouterOfLayer(0, replay)
    replay.enter(choices)
    first = torch.tensor([[3.0, 2.0, 1.0], [0.0, 5.0, 6.0]])
    with replay.following("record", trains=False), torch.no_grad():
        recorded = _choose(router, first)
    perturbed = (first.flip(1) * 7).requires_grad_()
    with replay.following("replay", trains=True):
        chosen = _choose(router, perturbed)
    assert chosen[1].tolist() == recorded[1].tolist() == [[0, 1], [2, 1]]
    assert torch.equal(chosen[0], perturbed.gather(1, recorded[1]))
    chosen[0].sum().backward()  # type: ignore[no-untyped-call]
    assert perturbed.grad is not None
    assert perturbed.grad.tolist() == [[1, 1, 0], [0, 1, 1]]
    assert _choose(router, perturbed)[1].tolist() != recorded[1].tolist()  # outside, it is free again


def test_layers_that_are_run_again_for_the_backward_pass_follow_their_own_micro_batch() -> None:
    replay = RoutingReplay([], tp_rank=0)
    router = RouterOfLayer(0, replay)
    scores = torch.zeros(1, 3)
    micros = [ExpertChoices({0: torch.tensor([[a, b]])}) for a, b in ((0, 1), (1, 2), (0, 2))]
    with replay.following("replay", trains=True):
        for micro in micros:
            replay.enter(micro)
            with torch.no_grad():
                _choose(router, scores)
        again = [_choose(router, scores)[1].tolist() for _ in micros]
    assert again == [[[0, 1]], [[1, 2]], [[0, 2]]]


def test_a_rank_that_sees_a_stretch_of_the_positions_follows_its_part() -> None:
    known = torch.tensor([[0, 1], [1, 2], [0, 2]])
    for tp_rank, expected in ((0, [[0, 1], [1, 2]]), (1, [[0, 2], [0, 1]])):  # the last position is filled up, and free
        replay = RoutingReplay([], tp_rank)
        replay.enter(ExpertChoices({0: known}))
        with replay.following("replay", trains=False):
            assert _choose(RouterOfLayer(0, replay), torch.tensor([[3.0, 2.0, 1.0]] * 2))[1].tolist() == expected


def _with(sample: Sample, *, layer: int, value: int) -> Sample:
    column = sample.columns[ROUTED_EXPERTS].copy()
    column[2, layer] = value
    return replace(sample, columns={ROUTED_EXPERTS: column.astype(np.int16)})


def _choose(router: RouterOfLayer, scores: Tensor) -> tuple[Tensor, Tensor]:
    return router.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
