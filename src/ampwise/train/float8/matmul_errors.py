"""The error of each matmul of a layer in FP8, against BF16, on the tensors of a real step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.train.float8.fp8_cast import cast_to_fp8
from ampwise.train.float8.fp8_linear import out_dtype, scaled_matmul
from ampwise.train.float8.layer_forward import Fp8Forward
from ampwise.train.float8.recipe import MATMULS

__all__ = ["ProbingForward", "empty_sums", "relative_errors"]

TINIEST = torch.finfo(torch.float32).tiny


class ProbingForward:
    """A layer's forward that also computes each of its matmuls in FP8 and in BF16, and adds up how they differ.

    What the layer computes does not change. Takes the time of twice as many matmuls, so it is used for one step only.
    """

    def __init__(self, how: Fp8Forward, sums: Tensor, *, e5m2: bool) -> None:
        self._how, self._sums, self._e5m2 = how, sums, e5m2
        self.attributes = getattr(how, "attributes", {})

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        out = self._how(module, x)
        if not (torch.is_grad_enabled() and x.numel()):
            return out
        probe: Any = _Probe.apply
        probed: Tensor = probe(out, x, module.weight, self._sums, self._e5m2, out_dtype(x))
        return probed


class _Probe(torch.autograd.Function):
    """Passes the output and its gradient on; a function and no hook, so that checkpoints need not keep the input."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, weight: Tensor, sums: Tensor, e5m2: bool, dtype: torch.dtype
    ) -> Tensor:
        matrix = x.to(dtype).reshape(-1, x.shape[-1])
        ctx.save_for_backward(matrix, weight)
        ctx.sums, ctx.e5m2 = sums, e5m2
        x8 = cast_to_fp8(matrix, None, e5m2=False, rows=True, columns=False)
        weight8 = cast_to_fp8(weight, None, e5m2=False, rows=True, columns=False)
        narrow = scaled_matmul(x8.rows, weight8.rows, x8.inverse, weight8.inverse, dtype, fast=True)
        _add(sums, "forward", narrow, F.linear(matrix, weight.to(dtype)))
        return out.clone()  # a view could not be changed in place by the model

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight = ctx.needs_input_grad[1:3]
        with torch.no_grad():
            g = gradient.reshape(-1, gradient.shape[-1])
            wide = g.to(x.dtype)
            g8 = cast_to_fp8(g.contiguous(), None, e5m2=ctx.e5m2, rows=by_x, columns=by_weight)
            if by_x:
                weight8 = cast_to_fp8(weight, None, e5m2=False, rows=False, columns=True)
                narrow = scaled_matmul(g8.rows, weight8.columns, g8.inverse, weight8.inverse, x.dtype)
                _add(ctx.sums, "dgrad", narrow, wide @ weight.to(x.dtype))
            if by_weight:
                x8 = cast_to_fp8(x, None, e5m2=False, rows=False, columns=True)
                narrow = scaled_matmul(g8.columns, x8.columns, g8.inverse, x8.inverse, weight.dtype)
                _add(ctx.sums, "wgrad", narrow, wide.t() @ x)
        return gradient, None, None, None, None, None


def empty_sums(layers: int, device: torch.device) -> Tensor:
    """Return the sums of squares for some layers: of the difference and of the result in BF16, for each matmul."""
    return torch.zeros(layers, len(MATMULS), 2, dtype=torch.float64, device=device)


def _add(sums: Tensor, matmul: str, narrow: Tensor, wide: Tensor) -> None:
    """Add squares, relative to the largest magnitude at first: squares of small gradients would vanish in FP32."""
    wide = wide.float()
    largest = wide.abs().amax().clamp_min(TINIEST)
    for column, values in enumerate((narrow.float() - wide, wide)):
        norm = torch.linalg.vector_norm(values / largest).double() * largest.double()
        sums[MATMULS.index(matmul), column] += norm.square()


def relative_errors(sums: Tensor) -> list[list[float | None]]:
    """Return the error of each matmul of each layer relative to its result; None if it did not run. Syncs."""
    return [
        [(difference / result) ** 0.5 if result else None for difference, result in layer] for layer in sums.tolist()
    ]
