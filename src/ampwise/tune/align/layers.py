"""Layers padded with rows and columns of zeros that compute the same as without padding.

A layer is converted in place, by its class: its name, its hooks and all references to it stay. Its size attributes
(``in_features``, ``num_embeddings``) and the sizes in its state dict are the unpadded ones; only its parameters are
larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def _pad_columns(tensor: Tensor, own: int, wanted: int) -> Tensor:
    """Pad the last dimension with zeros if it has the unpadded size; other sizes are left for the matmul to reject."""
    if own == wanted or tensor.shape[-1] != own:
        return tensor
    # Not F.pad, which fills all of the result before it copies.
    return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:-1], wanted - own))), dim=-1)


def _outputs(made: Tensor, own: int, gives: str) -> Tensor:
    """Return a layer's outputs without padding, masked, or with padding, as ``gives`` says."""
    if gives == KEPT or made.shape[-1] == own:
        return made
    if gives == SLICED:
        return made[..., :own]
    with torch.no_grad():  # a softmax gives these a gradient of exactly zero, so autograd need not track it
        made[..., own:] = -math.inf
    return made


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
            wide = pad_to(saved, tuple(parameter.shape))
            if local_metadata.get("assign_to_params_buffers"):
                # Layers that share a parameter share the assigned tensor, stored on the parameter to be replaced.
                memory = saved.device, saved.data_ptr(), saved.shape
                made: tuple[Any, Tensor] | None = getattr(parameter, "assigned", None)
                if made is None or made[0] != memory:
                    made = parameter.assigned = memory, wide  # type: ignore[attr-defined]
                wide = made[1]
            state_dict[key] = wide
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _take_values(self, plain: nn.Module) -> None:
        """Take the values of a layer without padding, and zero the padding."""
        with torch.no_grad():
            for name in self.own_shapes():
                parameter = self._parameters[name]
                assert parameter is not None
                parameter.copy_(pad_to(plain._parameters[name], tuple(parameter.shape)))  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        weight = self._parameters["weight"]
        assert weight is not None
        return f"{super().extra_repr()}, padded to {'×'.join(map(str, weight.shape))}, {self.gives}"


class PaddedLinear(_Padded, nn.Linear):
    """``nn.Linear`` with rows of zeros, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        wide = _pad_columns(input, self.in_features, self.weight.shape[1])
        return _outputs(F.linear(wide, self.weight, self.bias), self.out_features, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes if self.bias is None else shapes | {"bias": (self.out_features,)}

    def reset_parameters(self) -> None:
        """Draw new values as the layer would without padding."""
        sizes, weight = (self.in_features, self.out_features), self.weight
        plain = nn.Linear(*sizes, bias=self.bias is not None, device=weight.device, dtype=weight.dtype)
        self._take_values(plain)


class PaddedEmbedding(_Padded, nn.Embedding):
    """``nn.Embedding`` with rows that no token uses, columns of zeros, or both."""

    def forward(self, input: Tensor) -> Tensor:
        return _outputs(super().forward(input), self.embedding_dim, self.gives)

    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def reset_parameters(self) -> None:
        """Draw new values as the layer would without padding."""
        whole = self._parameters["weight"]
        assert whole is not None
        sizes = self.num_embeddings, self.embedding_dim
        plain = nn.Embedding(*sizes, padding_idx=self.padding_idx, device=whole.device, dtype=whole.dtype)
        self._take_values(plain)


# --- an embedding whose weight the model's code also multiplies with, to get logits without a head layer -------------
# There is then no module call to change, only ``F.linear(x, self.wte.weight)`` or ``x @ self.wte.weight.T``. So
# ``weight`` returns a tensor of the unpadded rows that multiplies with the padded ones. Any other operation uses the
# unpadded rows.


class TiedEmbedding(PaddedEmbedding):
    """Padded embedding whose weight also makes the logits; ``parameters()`` has the padded parameter."""

    logits: str  # sliced or masked; ``gives`` applies to lookups

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpadded rows."""
        whole = self._parameters["weight"]
        assert whole is not None
        shown = crop_to(whole, (self.num_embeddings, self.embedding_dim)).as_subclass(_OwnRows)
        shown.whole, shown.logits = whole, self.logits
        return shown


class _OwnRows(Tensor):
    """A weight without its padding; matmuls and lookups use the padded one."""

    whole: Tensor
    logits: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_PADDING and len(args) > 1 and isinstance(args[1], cls):
            return _WITH_PADDING[func](*args, **kwargs)
        if func in _ON_WEIGHT and len(args) == 1 and not kwargs:
            return _ON_WEIGHT[func](args[0])
        if func in _WRITES and isinstance(args[0], cls):
            return _WRITES[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class _TransposedRows(Tensor):
    """The transpose of an ``_OwnRows``."""

    weight: _OwnRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MATMULS and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return _logits(args[0], args[1].weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _logits(inputs: Tensor, weight: _OwnRows, bias: Tensor | None = None) -> Tensor:
    rows, columns = weight.whole.shape
    wide = _pad_columns(inputs, weight.shape[1], columns)
    made = F.linear(wide, weight.whole, bias if bias is None else pad_to(bias, (rows,)))
    return _outputs(made, weight.shape[0], weight.logits)


def _looked_up(tokens: Tensor, weight: _OwnRows, *rest: Any, **options: Any) -> Tensor:
    index, *others = rest or (options.pop("padding_idx", None),)
    if index is not None and index < 0:  # counted from the end of the unpadded rows
        index += weight.shape[0]
    return F.embedding(tokens, weight.whole, index, *others, **options)


def _gradient(weight: _OwnRows) -> Tensor | None:
    return None if weight.whole.grad is None else crop_to(weight.whole.grad, tuple(weight.shape))


def _set_data(weight: _OwnRows, data: Tensor) -> None:
    weight.whole.data = pad_to(data, tuple(weight.whole.shape))


def _set_gradient(weight: _OwnRows, gradient: Tensor | None) -> None:
    weight.whole.grad = None if gradient is None else pad_to(gradient, tuple(weight.whole.shape))


def _set_trained(weight: _OwnRows, requires_grad: bool = True) -> _OwnRows:
    weight.whole.requires_grad_(requires_grad)
    return weight


def _hooked(weight: _OwnRows, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook that sees, and may return, the gradient of the unpadded rows."""
    own, shape = tuple(weight.shape), tuple(weight.whole.shape)

    def on_whole(gradient: Tensor) -> Tensor | None:
        changed = hook(crop_to(gradient, own))
        return None if changed is None else pad_to(changed, shape)

    return weight.whole.register_hook(on_whole)


def _transposed(weight: _OwnRows) -> _TransposedRows:
    with torch._C.DisableTorchFunctionSubclass():
        transposed = weight.t().as_subclass(_TransposedRows)
    transposed.weight = weight
    return transposed


_WITH_PADDING: dict[Any, Callable[..., Any]] = {F.linear: _logits, F.embedding: _looked_up}
_ON_WEIGHT: dict[Any, Callable[[_OwnRows], Any]] = {
    Tensor.grad.__get__: _gradient,  # type: ignore[union-attr]
    Tensor.T.__get__: _transposed,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _transposed,  # type: ignore[attr-defined]
    Tensor.t: _transposed,
    torch.t: _transposed,
}
# Writes to the weight go to the parameter, of which it is a view.
_WRITES: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_gradient,  # type: ignore[union-attr]
    Tensor.grad.__delete__: lambda weight: _set_gradient(weight, None),  # type: ignore[union-attr]
    Tensor.requires_grad.__set__: _set_trained,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_trained,
    Tensor.register_hook: _hooked,
}
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
