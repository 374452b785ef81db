"""Layers padded with rows and columns of zeros that compute the same as without padding.

A layer is converted in place, by its class: its name, its hooks and all references to it stay. Its size attributes
(``in_features``, ``num_embeddings``) and the sizes in its state dict are the unpadded ones; only its parameters are
larger.
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
    "crop_to",
    "layer_outputs",
    "pad_columns",
    "pad_to",
]

# What a layer does with the outputs that padding adds: return a view without them, set them to -inf, or return
# them, as zeros, for a layer that has columns for them.
SLICED, MASKED, KEPT = "sliced", "masked", "kept"


def pad_to(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor padded with zeros at the end of each dimension."""
    missing = [wanted - size for size, wanted in zip(tensor.shape, shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for count in reversed(missing) for amount in (0, count)])


def crop_to(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view without the padding that ``widened`` added."""
    return tensor[tuple(slice(size) for size in shape)]


def pad_columns(tensor: Tensor, own: int, wanted: int) -> Tensor:
    """Pad the last dimension with zeros if it has the unpadded size; other sizes are left for the matmul to reject."""
    if own == wanted or tensor.shape[-1] != own:
        return tensor
    # Not F.pad, which fills all of the result before it copies.
    return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:-1], wanted - own))), dim=-1)


def layer_outputs(made: Tensor, own: int, gives: str) -> Tensor:
    """Return a layer's outputs without padding, masked, or with padding, as ``gives`` says."""
    if gives == KEPT or made.shape[-1] == own:
        return made
    if gives == SLICED:
        return made[..., :own]
    with torch.no_grad():  # a softmax gives these a gradient of exactly zero, so autograd need not track it
        made[..., own:] = -math.inf
    return made


def _widened_once(parameter: nn.Parameter, saved: Tensor, is_assigned: bool) -> Tensor:
    """Return the value to load into a parameter. Layers that share a parameter share an assigned tensor, too."""
    if not is_assigned:
        return pad_to(saved, tuple(parameter.shape))
    memory = saved.device, saved.data_ptr(), saved.shape
    made: tuple[Any, Tensor] | None = getattr(parameter, "assigned", None)  # stored on the parameter to be replaced
    if made is None or made[0] != memory:
        made = parameter.assigned = memory, pad_to(saved, tuple(parameter.shape))  # type: ignore[attr-defined]
    return made[1]


class _Padded(nn.Module):
    """Base of the padded layers: state dicts have unpadded sizes."""

    gives: str

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the unpadded shapes of the padded parameters."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shape in self.own_shapes().items():
            if prefix + name in destination:
                # A view, so that in-place updates, as of averaged weights, reach the parameter.
                destination[prefix + name] = crop_to(destination[prefix + name], shape)

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
                saved = crop_to(parameter.detach(), shape)
            state_dict[key] = _widened_once(parameter, saved, bool(local_metadata.get("assign_to_params_buffers")))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def reset_parameters(self) -> None:
        """Draw new values as the layer would without padding, and zero the padding."""
        plain = self._unpadded()
        with torch.no_grad():
            for name in self.own_shapes():
                parameter = self._parameters[name]
                assert parameter is not None
                parameter.copy_(pad_to(plain._parameters[name], tuple(parameter.shape)))  # type: ignore[arg-type]

    def _unpadded(self) -> nn.Module:
        """Return a new layer of the same kind, without padding."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        weight = self._parameters["weight"]
        assert weight is not None
        return f"{super().extra_repr()}, padded to {'×'.join(map(str, weight.shape))}, {self.gives}"


class PaddedLinear(_Padded, nn.Linear):
    """``nn.Linear`` with rows of zeros, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        wide = pad_columns(input, self.in_features, self.weight.shape[1])
        return layer_outputs(F.linear(wide, self.weight, self.bias), self.out_features, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes if self.bias is None else shapes | {"bias": (self.out_features,)}

    def _unpadded(self) -> nn.Module:
        sizes, weight = (self.in_features, self.out_features), self.weight
        return nn.Linear(*sizes, bias=self.bias is not None, device=weight.device, dtype=weight.dtype)


class PaddedEmbedding(_Padded, nn.Embedding):
    """``nn.Embedding`` with rows that no token uses, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_outputs(super().forward(input), self.embedding_dim, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def _unpadded(self) -> nn.Module:
        whole = self._parameters["weight"]
        assert whole is not None
        sizes = self.num_embeddings, self.embedding_dim
        return nn.Embedding(*sizes, padding_idx=self.padding_idx, device=whole.device, dtype=whole.dtype)
