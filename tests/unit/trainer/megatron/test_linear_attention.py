"""The gated delta net over packed rows: each segment as it is alone, and a row as transformers computes it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from headrace.models.family import Sections
from headrace.models.registry import architecture, table
from services.trainer.hugging_face.shards import cut
from services.trainer.megatron import linear_attention
from services.trainer.megatron.layers import SegmentedRow, transformer_engine_row
from services.trainer.megatron.linear_attention import GatedDeltaNet, Scan, gated_delta_rule
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
CONFIG = tiny_config("qwen3_next")


class Linear(nn.Linear):
    """Megatron's linear layers, on one rank."""

    def __init__(self, size: int, outputs: int, **_: Any) -> None:
        super().__init__(size, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), None


@pytest.fixture
def reference() -> Qwen3NextGatedDeltaNet:
    torch.manual_seed(0)
    net = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**CONFIG), 0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net.double()


@pytest.fixture(params=[None, "selective"])
def net(
    request: pytest.FixtureRequest, reference: Qwen3NextGatedDeltaNet, monkeypatch: pytest.MonkeyPatch
) -> GatedDeltaNet:
    """The same weights, through the table; one rank, without process groups. With --recompute-activations, too."""
    monkeypatch.setattr(linear_attention, "copy_to_tensor_model_parallel_region", lambda weight, group: weight)
    a = architecture(CONFIG)
    assert a.linear_attention is not None
    config = TransformerConfig(
        num_layers=1,
        hidden_size=a.hidden_size,
        num_attention_heads=1,
        layernorm_epsilon=a.norm_epsilon,
        recompute_granularity=request.param,
    )
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    made = GatedDeltaNet(config, SimpleNamespace(linear_qkv=Linear, linear_proj=Linear), a.linear_attention, group)
    theirs = reference.state_dict()
    for row in table(a).layer(0):
        if row.megatron.startswith("self_attention."):
            parts = [theirs[tensor.name.rpartition("linear_attn.")[2]] for tensor in row.hf]
            made.get_parameter(row.megatron.removeprefix("self_attention.")).data = cut(row.sharding, parts, 0, 1)
    return made


def hidden(size: int = SIZE) -> Tensor:
    return torch.randn(size, 1, CONFIG["hidden_size"], dtype=torch.float64)


def test_the_rule_is_the_recurrence_over_a_segment_and_its_prefix() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(SIZE, 2, 8, dtype=torch.float64) * 0.3 for _ in "qk")
    value, (decay, beta) = torch.randn(SIZE, 2, 5, dtype=torch.float64), torch.rand(2, SIZE, 2, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (query, key, value, -decay, beta)]
    found = partial(gated_delta_rule, scan=Scan.of(ROW, query.device))(*inputs)
    expected = recurrence(*inputs)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(o, inputs, upstream) for o in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for segment in ROW:
        state = query.new_zeros(2, 8, 5) if segment.prefix is None else states[segment.prefix]
        for t in range(segment.start, segment.end):
            state = decay[t, :, None, None].exp() * state
            update = beta[t, :, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t, :, :, None] * update[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
        states.append(state)
    return torch.stack(outputs)


def test_a_segment_of_a_packed_row_is_what_it_is_alone(net: GatedDeltaNet) -> None:
    tokens = hidden()
    found, _ = net(tokens, packed_seq_params=SegmentedRow(segments=ROW))
    for segment in ROW:
        own = tokens[segment.start : segment.end]
        alone = own if segment.prefix is None else torch.cat([tokens[: ROW[segment.prefix].end], own])
        expected, _ = net(alone)
        torch.testing.assert_close(found[segment.start : segment.end], expected[-segment.size :])


def test_rows_of_transformer_engine_and_padded_ones_are_segments_too(net: GatedDeltaNet) -> None:
    tokens = hidden(80)
    halves = (RowSegment(0, 40), RowSegment(40, 80))
    rows = Rows(torch.zeros(1, 80, dtype=torch.int64), torch.arange(80)[None], halves)
    packed, _ = net(tokens, packed_seq_params=transformer_engine_row(rows, halves))
    padded, _ = net(torch.cat(tokens.split(40), dim=1))
    torch.testing.assert_close(packed, torch.cat(padded.split(1, dim=1)))


def test_outputs_and_gradients_are_those_of_transformers(net: GatedDeltaNet, reference: Qwen3NextGatedDeltaNet) -> None:
    """Which computes the rule in float32."""
    tokens = hidden()
    found, _ = net(tokens)
    expected = reference(tokens.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(expected)
    for output in (found, expected):
        output.backward(upstream)
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    a = architecture(CONFIG)
    for row in table(a).layer(0):
        if row.megatron.startswith("self_attention."):
            parts = [grads[tensor.name.rpartition("linear_attn.")[2]] for tensor in row.hf]
            mine = net.get_parameter(row.megatron.removeprefix("self_attention.")).grad
            theirs = cut(row.sharding, parts, 0, 1)
            assert (mine - theirs).norm() < 1e-5 * theirs.norm(), row.megatron


def test_each_rank_holds_its_heads_of_every_section() -> None:
    rows = torch.arange(24)[:, None]
    sections = Sections(((8, 4, 12),), times=2)
    first, second = (cut(sections, [rows], rank, 2)[:, 0].tolist() for rank in range(2))
    assert first == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert second == [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
