"""Transformer Engine's layers as its documents describe them: arguments, names of parameters, and what they return."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

distributed = SimpleNamespace(CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}))


class Fp8Padding:
    """Imported by name alone."""


class Fp8Unpadding:
    """Imported by name alone."""


class DotProductAttention(nn.Module):
    """A base class alone: headrace's own attention stands in its place."""


class _Base(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_size: int,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self._size = (
            out_features // (tp_size if parallel_mode == "column" else 1),
            in_features // (tp_size if parallel_mode == "row" else 1),
        )
        self._dtype, self._has_bias = params_dtype, bias

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=self._dtype))

    def _gathered(self, x: Tensor) -> Tensor:
        from megatron.core import tensor_parallel

        if self.parallel_mode != "column":
            return x
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(x)

    def _summed(self, y: Tensor) -> Tensor:
        from megatron.core import tensor_parallel

        if self.parallel_mode != "row":
            return y
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(y)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(y)


class Linear(_Base):
    """Column-parallel, row-parallel, or whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = self._parameter(*self._size)
        if self._has_bias:
            self.bias = self._parameter(self._size[0])

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The output, and the bias behind it if it is asked for."""
        y = self._summed(nn.functional.linear(self._gathered(x), self.weight))
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self._has_bias else y


class LayerNormLinear(_Base):
    """Normalizes, then multiplies."""

    def __init__(
        self,
        *args: Any,
        eps: float,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = self._parameter(self._size[1])
        self.weight = self._parameter(*self._size)
        if self._has_bias:
            self.bias = self._parameter(self._size[0])

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The output, the bias if it is asked for, and the normalized input if it is."""
        assert self.normalization == "RMSNorm"
        gamma = self.layer_norm_weight + self.zero_centered_gamma
        normed = nn.functional.rms_norm(x, x.shape[-1:], gamma, self.eps)
        y = nn.functional.linear(self._gathered(normed), self.weight)
        y = y + self.bias if self._has_bias and not self.return_bias else y
        rest = (*([self.bias] if self.return_bias else []), *([normed] if self.return_layernorm_output else []))
        return (y, *rest) if rest else y


class GroupedLinear(_Base):
    """Several layers, each of which has its own stretch of the input."""

    def __init__(self, num_gemms: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", self._parameter(*self._size))

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """The outputs, one behind the other."""
        assert self.parallel_mode is None or not self._has_bias
        parts = zip(x.split(m_splits), range(self.num_gemms), strict=True)
        return torch.cat([nn.functional.linear(part, getattr(self, f"weight{number}")) for part, number in parts])


class RMSNorm(nn.Module):
    """With weights that sequence parallelism marks."""

    def __init__(
        self, hidden_size: int, eps: float, sequence_parallel: bool, zero_centered_gamma: bool, **_: Any
    ) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.zeros(hidden_size))
        weight.sequence_parallel = sequence_parallel
        self.weight = weight
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns […, hidden_size]."""
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.zero_centered_gamma, self.eps)


class LayerNorm(RMSNorm):
    """A base class alone."""
