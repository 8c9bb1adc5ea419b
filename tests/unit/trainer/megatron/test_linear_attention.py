"""Linear attention over packed rows: each segment as it is alone, and a row as transformers computes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from headrace.models.architecture import Mamba
from headrace.models.family import Sections
from headrace.models.registry import architecture, table
from services.trainer.hugging_face.shards import cut
from services.trainer.megatron import linear_attention
from services.trainer.megatron.layers import SegmentedRow, transformer_engine_row
from services.trainer.megatron.linear_attention import GatedDeltaNet, MambaMixer, Scan, gated_delta_rule, state_space
from services.trainer.plan.rows import Rows, RowSegment
from tests.support.models.tiny_families import tiny_config

LONG = 150  # more than two chunks
ROW = (
    RowSegment(0, LONG),
    RowSegment(LONG, LONG + 1, 0),
    RowSegment(LONG + 1, LONG + 70, 0),
    RowSegment(LONG + 70, LONG + 72),
)
SIZE = ROW[-1].end
KINDS = {
    "qwen3_next": lambda config: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**config), 0),
    "nemotron_h": lambda config: NemotronHMamba2Mixer(NemotronHConfig(**config), 0),
}
HIDDEN = 64


class Linear(nn.Linear):
    """Megatron's linear layers, on one rank."""

    def __init__(self, size: int, outputs: int, **_: Any) -> None:
        super().__init__(size, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), None


@pytest.fixture(params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reference(family: str) -> nn.Module:
    torch.manual_seed(0)
    net = KINDS[family](tiny_config(family))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net.double()


@pytest.fixture(params=[None, "selective"])
def net(
    request: pytest.FixtureRequest, family: str, reference: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> GatedDeltaNet | MambaMixer:
    """The same weights, through the table; one rank, without process groups. With --recompute-activations, too."""
    monkeypatch.setattr(linear_attention, "copy_to_tensor_model_parallel_region", lambda weight, group: weight)
    a = architecture(tiny_config(family))
    assert a.linear_attention is not None
    config = TransformerConfig(
        num_layers=1,
        hidden_size=a.hidden_size,
        num_attention_heads=1,
        layernorm_epsilon=a.norm_epsilon,
        recompute_granularity=request.param,
    )
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    kind: Any = MambaMixer if isinstance(a.linear_attention, Mamba) else GatedDeltaNet
    made: GatedDeltaNet | MambaMixer
    made = kind(config, SimpleNamespace(linear_qkv=Linear, linear_proj=Linear), a.linear_attention, group)
    for name, weight in in_megatrons_order(family, reference.state_dict()).items():
        made.get_parameter(name).data = weight
    return made


def in_megatrons_order(family: str, theirs: Any) -> dict[str, Tensor]:
    """Of transformers' parameters, or of their gradients."""
    found = {}
    for row in table(architecture(tiny_config(family))).layer(0):
        if row.megatron.startswith("self_attention."):
            parts = [theirs[re.split("linear_attn[.]|mixer[.]", tensor.name)[1]] for tensor in row.hf]
            found[row.megatron.removeprefix("self_attention.")] = cut(row.sharding, parts, 0, 1)
    return found


def hidden(size: int = SIZE) -> Tensor:
    return torch.randn(size, 1, HIDDEN, dtype=torch.float64)


def test_the_delta_rule_is_the_recurrence_over_a_segment_and_its_prefix() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(SIZE, 2, 8, dtype=torch.float64) * 0.3 for _ in "qk")
    value, (decay, beta) = torch.randn(SIZE, 2, 5, dtype=torch.float64), torch.rand(2, SIZE, 2, dtype=torch.float64)
    assert_equal_with_gradients(gated_delta_rule, recurrence, [query, key, value, -decay, beta])


def test_the_state_space_is_the_recurrence_over_a_segment_and_its_prefix() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(SIZE, 2, 8, dtype=torch.float64) * 0.3 for _ in "qk")
    value, decay = torch.randn(SIZE, 4, 5, dtype=torch.float64), torch.rand(SIZE, 4, dtype=torch.float64)

    def expected(query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        return recurrence(*(each.repeat_interleave(2, dim=1) for each in (query, key)), *others)

    assert_equal_with_gradients(state_space, expected, [query, key, value, -decay])


def assert_equal_with_gradients(
    rule: Callable[..., Tensor], other: Callable[..., Tensor], tensors: list[Tensor]
) -> None:
    inputs = [each.requires_grad_() for each in tensors]
    found, expected = partial(rule, scan=Scan.of(ROW, inputs[0].device))(*inputs), other(*inputs)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(o, inputs, upstream) for o in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """Without beta nothing is read before a state is written."""
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for segment in ROW:
        state = query.new_zeros(query.shape[1], 8, 5) if segment.prefix is None else states[segment.prefix]
        for t in range(segment.start, segment.end):
            state = decay[t, :, None, None].exp() * state
            update = value[t]
            if beta is not None:
                update = beta[t, :, None] * (update - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t, :, :, None] * update[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
        states.append(state)
    return torch.stack(outputs)


def test_a_segment_of_a_packed_row_is_what_it_is_alone(net: GatedDeltaNet | MambaMixer) -> None:
    tokens = hidden()
    found, _ = net(tokens, packed_seq_params=SegmentedRow(segments=ROW))
    for segment in ROW:
        own = tokens[segment.start : segment.end]
        alone = own if segment.prefix is None else torch.cat([tokens[: ROW[segment.prefix].end], own])
        expected, _ = net(alone)
        torch.testing.assert_close(found[segment.start : segment.end], expected[-segment.size :])


def test_rows_of_transformer_engine_and_padded_ones_are_segments_too(net: GatedDeltaNet | MambaMixer) -> None:
    tokens = hidden(80)
    halves = (RowSegment(0, 40), RowSegment(40, 80))
    rows = Rows(torch.zeros(1, 80, dtype=torch.int64), torch.arange(80)[None], halves)
    packed, _ = net(tokens, packed_seq_params=transformer_engine_row(rows, halves))
    padded, _ = net(torch.cat(tokens.split(40), dim=1))
    torch.testing.assert_close(packed, torch.cat(padded.split(1, dim=1)))


def test_outputs_and_gradients_are_those_of_transformers(
    net: GatedDeltaNet | MambaMixer, family: str, reference: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which computes in float32: here its casts to float give float64. Of the delta net they are in kernels' code."""
    if family == "nemotron_h":
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        monkeypatch.setattr(torch, "float32", torch.float64)
    rounding = 1e-12 if family == "nemotron_h" else 1e-5
    tokens = hidden()
    found, _ = net(tokens)
    expected = reference(tokens.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=10 * rounding, atol=rounding)
    upstream = torch.randn_like(expected)
    for output in (found, expected):
        output.backward(upstream)
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, theirs in in_megatrons_order(family, grads).items():
        assert (net.get_parameter(name).grad - theirs).norm() < rounding * theirs.norm(), name


def test_each_rank_holds_its_heads_of_every_section() -> None:
    rows = torch.arange(24)[:, None]
    sections = Sections(((8, 4, 12),), times=2)
    first, second = (cut(sections, [rows], rank, 2)[:, 0].tolist() for rank in range(2))
    assert first == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert second == [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
