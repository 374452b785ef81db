"""Layers whose weights have rows and columns of zeros besides their own, and which compute what they did without.

A layer is made into one of these in place, by its class: its name, its hooks and those who hold it stay. Sizes that
one asks it for (``in_features``, ``num_embeddings``) and those in its state dict are the layer's own; only its
parameters are larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "KEPT",
    "MASKED",
    "SLICED",
    "PaddedEmbedding",
    "PaddedLinear",
    "given",
    "narrowed",
    "widened",
    "with_columns",
]

# What becomes of the outputs that padding adds: a view without them, -inf in their place, or they stay, as zeros,
# for a layer that has the columns for them.
SLICED, MASKED, KEPT = "sliced", "masked", "kept"


def widened(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor with zeros after its own values, in every dimension as many as it takes."""
    missing = [wanted - size for size, wanted in zip(tensor.shape, shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for count in reversed(missing) for amount in (0, count)])


def narrowed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What ``widened`` was given: a view."""
    return tensor[tuple(slice(size) for size in shape)]


def with_columns(tensor: Tensor, own: int, wanted: int) -> Tensor:
    """Rows of a layer's own length, with zeros at their ends; any others are left for the product to refuse."""
    if own == wanted or tensor.shape[-1] != own:
        return tensor
    # Not F.pad, which fills all of the result before it copies.
    return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:-1], wanted - own))), dim=-1)


def given(made: Tensor, own: int, gives: str) -> Tensor:
    """What a layer gives of what it made: its own outputs, or all of them."""
    if gives == KEPT or made.shape[-1] == own:
        return made
    if gives == SLICED:
        return made[..., :own]
    with torch.no_grad():  # a softmax leaves these a gradient of exactly zero, so there is nothing to hold back
        made[..., own:] = -math.inf
    return made


def _widened_once(parameter: nn.Parameter, saved: Tensor, is_assigned: bool) -> Tensor:
    """What to load into a parameter. Layers that share one also share what is assigned to them, if that was shared."""
    if not is_assigned:
        return widened(saved, tuple(parameter.shape))
    memory = saved.device, saved.data_ptr(), saved.shape
    made: tuple[Any, Tensor] | None = getattr(parameter, "assigned", None)  # kept on who is about to be replaced
    if made is None or made[0] != memory:
        made = parameter.assigned = memory, widened(saved, tuple(parameter.shape))  # type: ignore[attr-defined]
    return made[1]


class _Padded(nn.Module):
    """What the padded layers share: state dicts in the layer's own sizes."""

    gives: str

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the parameters that are padded, their shapes without it."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shape in self.own_shapes().items():
            if prefix + name in destination:
                # A view: what is written to it, as averages of weights are, is written to the parameter.
                destination[prefix + name] = narrowed(destination[prefix + name], shape)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, shape in self.own_shapes().items():
            key, parameter = prefix + name, self._parameters[name]
            saved = state_dict.get(key)
            if not isinstance(saved, Tensor) or parameter is None:
                continue
            if tuple(saved.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {saved.shape} from checkpoint, the shape in "
                    f"current model is {torch.Size(shape)} (which is padded to {parameter.shape})."
                )
                saved = narrowed(parameter.detach(), shape)
            state_dict[key] = _widened_once(parameter, saved, bool(local_metadata.get("assign_to_params_buffers")))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def reset_parameters(self) -> None:
        """New values, as the layer would have drawn them without padding, and zeros after them."""
        plain = self._unpadded()
        with torch.no_grad():
            for name in self.own_shapes():
                parameter = self._parameters[name]
                assert parameter is not None
                parameter.copy_(widened(plain._parameters[name], tuple(parameter.shape)))  # type: ignore[arg-type]

    def _unpadded(self) -> nn.Module:
        """A new layer of the same kind, without padding."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        weight = self._parameters["weight"]
        assert weight is not None
        return f"{super().extra_repr()}, padded to {'×'.join(map(str, weight.shape))}, {self.gives}"


class PaddedLinear(_Padded, nn.Linear):
    """``nn.Linear`` with rows of zeros, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        wide = with_columns(input, self.in_features, self.weight.shape[1])
        return given(F.linear(wide, self.weight, self.bias), self.out_features, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes if self.bias is None else shapes | {"bias": (self.out_features,)}

    def _unpadded(self) -> nn.Module:
        sizes, weight = (self.in_features, self.out_features), self.weight
        return nn.Linear(*sizes, bias=self.bias is not None, device=weight.device, dtype=weight.dtype)


class PaddedEmbedding(_Padded, nn.Embedding):
    """``nn.Embedding`` with rows that no token has, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        return given(super().forward(input), self.embedding_dim, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def _unpadded(self) -> nn.Module:
        whole = self._parameters["weight"]
        assert whole is not None
        sizes = self.num_embeddings, self.embedding_dim
        return nn.Embedding(*sizes, padding_idx=self.padding_idx, device=whole.device, dtype=whole.dtype)
