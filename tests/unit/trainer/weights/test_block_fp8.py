"""Block FP8 against a reference in float64 that is written without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from headrace.errors import InvalidArgument
from headrace.models.folders import QuantizedForm
from headrace.publication import TensorSpec
from services.trainer.weights.engine_layout import EngineChecksums
from services.trainer.weights.quantization import dequantized, quantize, quantized, quantized_specs
from tests.support.fakes.engine_checksums import engine_checksums

FORM = QuantizedForm(frozenset({"a.weight"}), (128, 128), 2)


def e4m3(code: int) -> float:
    """The number behind eight bits: a sign, four bits of exponent with bias 7, three of fraction."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    return sign * (fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


NUMBERS = np.array([e4m3(code) for code in range(256) if code & 0x7F != 0x7F])
"""All that are finite."""


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[int, int, tuple[slice, slice]]]:
    grid = (range(-(-size // side)) for size, side in zip(shape, block, strict=True))
    for row, column in itertools.product(*grid):
        rows = slice(row * block[0], (row + 1) * block[0])
        yield row, column, (rows, slice(column * block[1], (column + 1) * block[1]))


def assert_is_nearest(weight: torch.Tensor, block: tuple[int, int]) -> None:
    """Each block's factor is its largest magnitude / 448, and each value the nearest that FP8 has."""
    values, factors = quantize(weight, block)
    assert (values.dtype, values.shape, values.is_contiguous()) == (torch.float8_e4m3fn, weight.shape, True)
    exact, found = weight.double().numpy(), values.double().numpy()
    seen = set()
    for row, column, place in blocks((weight.shape[0], weight.shape[1]), block):
        factor, largest = factors[row, column].double().item(), np.abs(exact[place]).max()
        assert factor == pytest.approx(1.0 if largest == 0 else max(largest / 448, 2.0**-126), rel=2**-22)
        assert_values(exact[place] / factor, found[place])
        seen.add((row, column))
    assert factors.shape == (max(row for row, _ in seen) + 1, max(column for _, column in seen) + 1)
    assert factors.dtype == torch.float32


def assert_values(wanted: NDArray[np.float64], found: NDArray[np.float64]) -> None:
    distances = np.abs(wanted[..., None] - NUMBERS).min(axis=-1)
    assert (np.abs(wanted - found) <= distances + np.abs(wanted) * 2**-22).all()


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 17), st.integers(1, 17)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(-44, 37),
    st.integers(0, 2**31),
)
def test_values_are_the_nearest_and_factors_bring_the_largest_to_448(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-3, 3) * 10.0**exponent
    weight *= torch.randint(0, 3, shape, generator=generator)  # some zeros
    assert_is_nearest(weight.to(dtype), block)


@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-126, 3.4e38])
def test_zeros_and_the_ends_of_float32_come_back_finite(value: float) -> None:
    weight = torch.full((130, 130), value)
    values, factors = quantize(weight, (128, 128))
    back = dequantized(values, factors, (128, 128))
    assert torch.isfinite(back).all()
    assert factors.min() >= 2.0**-126, "kernels that flush smaller numbers would multiply with 0"
    assert (back - weight).abs().max() <= value / 2**4 + 2.0**-136


def test_values_are_those_of_transformers_own_quantizer() -> None:
    weight = torch.randn(256, 384) * torch.logspace(-6, 6, 256)[:, None]
    weight[:128, :128] = 0

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(128, 128))

    theirs = Fp8Quantize(Quantizer()).convert({"a.weight": weight})
    values, factors = quantize(weight, (128, 128))
    torch.testing.assert_close(factors, theirs["a.weight_scale_inv"], rtol=2e-7, atol=0)
    assert (values.view(torch.uint8) != theirs["a.weight"].view(torch.uint8)).float().mean() < 1e-3, "ties"
    mine, others = (
        dequantized(each, by, (128, 128))
        for each, by in ((values, factors), (theirs["a.weight"], theirs["a.weight_scale_inv"]))
    )
    torch.testing.assert_close(mine, others, rtol=0.13, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name_once_all_are_gathered(bad: float) -> None:
    gathered = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("norm.weight", "a.weight", "b.weight"):
            gathered.append(name)
            yield name, torch.full((3, 4), bad)

    found = quantized(FORM, tensors())
    assert next(found)[0] == "norm.weight"
    with pytest.raises(InvalidArgument, match=r"a\.weight has values that are not finite"):
        next(found)
    assert gathered == ["norm.weight", "a.weight", "b.weight"], "other ranks gather, too"


def test_only_the_weights_that_have_factors_in_the_folder_are_quantized_and_specs_say_so() -> None:
    tensors = {"a.weight": torch.randn(130, 128), "gate.weight": torch.randn(8, 12), "norm.weight": torch.randn(12)}
    specs = [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
    found = dict(quantized(FORM, iter(tensors.items())))
    assert [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in found.items()
    ] == [TensorSpec(spec.name, tuple(spec.shape), spec.dtype) for spec in quantized_specs(FORM, specs)]
    assert list(found) == ["a.weight", "a.weight_scale_inv", "gate.weight", "norm.weight"]
    assert found["gate.weight"] is tensors["gate.weight"]
    assert sum(spec.num_bytes for spec in quantized_specs(FORM, specs)) == 130 * 128 + 2 * 4 + (8 * 12 + 12) * 4


@pytest.mark.parametrize("shape", [(128, 64), (128, 130), (4,), (2, 2, 128)])
def test_a_weight_that_engines_cannot_take_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"a\.weight has the shape .* Leave it in bfloat16"):
        quantized_specs(FORM, [TensorSpec("a.weight", shape, "bfloat16")])


def test_the_checksum_of_a_quantized_weight_is_that_of_what_it_stands_for() -> None:
    parts = {f"l.0.mlp.{name}_proj.weight": torch.randn(256, 384) for name in ("gate", "up")}
    form = QuantizedForm(frozenset(parts), (128, 128), 2)
    sums = EngineChecksums()
    for pair in quantized(form, iter(parts.items())):
        sums.update([pair])  # a weight and its factors may travel apart
    wholes = []
    for weight in parts.values():
        values, factors = (each.double().numpy() for each in quantize(weight, (128, 128)))
        wholes.append(values * np.kron(factors, np.ones((128, 128))))
    exact = torch.from_numpy(np.concatenate(wholes))
    expected = engine_checksums({"l.0.mlp.gate_up_proj.weight": exact.float().bfloat16()})
    assert sums.result() == expected
