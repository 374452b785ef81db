"""A few values of tensors, compared with later ones on their device."""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.train.scaler.step_result import AsyncScalars

__all__ = ["SAMPLED_TENSORS", "SampledValues", "StepComparison", "is_plain"]

SAMPLED_TENSORS = 32
SAMPLED_VALUES = 32  # of each


def _some_values(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES]


def is_plain(tensor: Tensor | None) -> bool:
    """Whether some values can be viewed: a dense, contiguous floating-point tensor that is not sharded."""
    return (
        tensor is not None
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.dtype.is_floating_point
        and not hasattr(tensor, "placements")
        and not tensor.is_meta
    )


class SampledValues:
    """A few values of a tensor, to be compared with later ones on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self._view = _some_values(tensor)
        self._before = self._view.clone()
        self.count = self._view.numel()

    def changed(self) -> AsyncScalars:
        """Return the number of values that have changed since."""
        return AsyncScalars((self._view != self._before).sum().float())


class StepComparison:
    """Some weights with a gradient before and after a step."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        chosen = parameters[:: max(len(parameters) // SAMPLED_TENSORS, 1)][:SAMPLED_TENSORS]
        self._views = [_some_values(each) for each in chosen]
        self._before = [each.clone() for each in self._views]
        gradients = torch.cat([_some_values(each.grad).float() for each in chosen])  # type: ignore[arg-type]
        self._tried = (gradients != 0) & gradients.isfinite()
        noticed = torch.cat([each.abs() * torch.finfo(each.dtype).eps for each in self._views])
        self._due = self._tried & ((lr * gradients).abs() > noticed)

    def after_step(self) -> AsyncScalars:
        """Return how many values had a gradient and how many have changed, and the squares of change and values.

        The last number says how many would have changed, had the gradient times the learning rate been subtracted.
        """
        pairs = list(zip(self._views, self._before, strict=True))
        moved = torch.cat([now != then for now, then in pairs]) & self._tried
        change = torch.cat([(now - then).float() for now, then in pairs])[self._tried]
        size = torch.cat([then.float() for _, then in pairs])[self._tried]
        return AsyncScalars(
            torch.stack(
                [
                    self._tried.sum().float(),
                    moved.sum().float(),
                    change.square().sum(),
                    size.square().sum(),
                    self._due.sum().float(),
                ]
            )
        )
