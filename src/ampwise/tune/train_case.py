"""A model, a batch and the loss function to train, made by a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from ampwise.errors import BadInput
from ampwise.trace.user_code import (
    UserFunction,
    call_user_function,
    describe_error,
    describe_type,
    load_function,
    python_path_of,
    split_function_name,
)

__all__ = ["EXAMPLE", "CaseFactory", "TrainCase", "load_factory", "make_factory"]

EXAMPLE = """\
  def make(batch=16):
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)"""
EXPECTED = f"expected a function that returns the model, a batch and the loss function:\n{EXAMPLE}"
SIZE_NAMES = ("batch", "batch_size")  # parameter that sets the number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """A model with a batch to train on, all on one device."""

    name: str
    model: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any]
    optimizer: Optimizer | None = None  # the user's own, if the function returned one

    def loss(self) -> Tensor:
        """Run a forward pass, and return the loss."""
        loss = _loss_in(self.loss_fn(*self.args, **self.kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else describe_type(loss)
            raise BadInput(f"{self.name}: the loss is {shown}, not a tensor with one element; {EXPECTED}")
        return loss

    @property
    def parameters(self) -> list[Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the batch, in order."""
        return [leaf for leaf in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(leaf, Tensor)]

    @property
    def rows(self) -> int | None:
        """Number of samples in the batch, by its first tensor; None if that has no dimension."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.ndim), None)

    @property
    def tokens(self) -> int | None:
        """Number of tokens, if the batch begins with a matrix of integers."""
        first = next((tensor for tensor in self.tensors if tensor.ndim), None)
        if first is None or first.ndim != 2 or first.is_floating_point() or first.dtype == torch.bool:
            return None
        return first.numel()

    def resized(self, rows: int) -> TrainCase:
        """Return a copy with a batch of so many rows: tensors with a row per sample are cut or repeated."""
        if rows < 1:
            raise BadInput(f"{self.name}: expected a batch of at least 1 row, got {rows}.")
        if self.rows is None:
            raise BadInput(f"{self.name}: its batch has no rows, so it cannot be resized.")
        resize = partial(_resized, before=self.rows, after=rows)
        return replace(self, args=tree_map(resize, self.args), kwargs=tree_map(resize, dict(self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFactory:
    """The user's function, which makes a new case each time."""

    name: str
    function: Callable[..., Any]
    size_name: str | None  # name of the parameter for the batch size
    named: UserFunction | None = None  # where it was found: its imports are resolved there, too

    @property
    def takes_batch(self) -> bool:
        """Whether the function takes the number of rows."""
        return self.size_name is not None

    def make(self, device: torch.device | str = "cpu", batch: int | None = None) -> TrainCase:
        """Call the function, on that device. If it takes no size, the batch is resized."""
        if batch is not None and batch < 1:
            raise BadInput(f"{self.name}: expected a batch of at least 1 row, got {batch}.")
        arguments = {} if batch is None or self.size_name is None else {self.size_name: batch}
        with python_path_of(self.named) if self.named else nullcontext():
            made = self._called(torch.device(device), arguments)
        case = _on(torch.device(device), _checked(made, self.name))
        return case if batch is None or case.rows == batch else case.resized(batch)

    def _called(self, device: torch.device, arguments: dict[str, int]) -> Any:
        """Call the function under ``device`` if it allows that, else without.

        Some code reads what it has made, or draws from a CPU generator, as a shuffling DataLoader does.
        """
        once = partial(call_user_function, self.name, self.function, self.name.rpartition(":")[2], arguments)
        if device.type == "cpu":
            return once()
        try:
            with device:
                return once()
        except BadInput:
            return once()


def load_factory(text: str) -> CaseFactory:
    """Load the function named by ``train:make`` or ``train.py:make``, with its module."""
    named = UserFunction(text, *split_function_name(text, ""))
    with python_path_of(named):
        return replace(make_factory(load_function(named), text), named=named)


def make_factory(function: Callable[..., Any], name: str | None = None) -> CaseFactory:
    """Wrap a function that makes model, batch and loss."""
    label = name or str(getattr(function, "__name__", "the function"))
    if not callable(function) or isinstance(function, Module):
        raise BadInput(f"{label}: got {describe_type(function)}; {EXPECTED}")
    return CaseFactory(name=label, function=function, size_name=_size_name(function, label))


def _loss_in(returned: Any) -> Any:
    """Find the loss in the result: the result itself, the first of several, or by its name, as in transformers."""
    if isinstance(returned, tuple) and returned and not hasattr(returned, "loss"):
        return returned[0]
    if isinstance(returned, Mapping):
        return returned.get("loss", returned)
    return returned if isinstance(returned, Tensor) else getattr(returned, "loss", returned)


def _size_name(function: Callable[..., Any], label: str) -> str | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return None
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if required:
        raise BadInput(
            f"{label}: it must be callable without arguments, but requires {', '.join(required)}: give them defaults. "
            f"A parameter `batch` receives the batch size; {EXPECTED}"
        )
    return next((name for name in SIZE_NAMES if name in named), None)


def _checked(made: Any, name: str) -> TrainCase:
    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 4:
        raise BadInput(f"{name}: it returned {describe_type(made)}; {EXPECTED}")
    model, batch, *rest = made
    loss_fn = rest[0] if rest and rest[0] is not None else model
    optimizer = rest[1] if len(rest) > 1 else None
    if not isinstance(model, Module):
        raise BadInput(f"{name}: it returned {describe_type(model)} as the model; {EXPECTED}")
    if next(model.parameters(), None) is None:
        raise BadInput(f"{name}: the model it returned has no parameters.")
    if not callable(loss_fn):
        raise BadInput(f"{name}: it returned {describe_type(loss_fn)} as the loss function; {EXPECTED}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise BadInput(f"{name}: it returned {describe_type(optimizer)} as the optimizer; {EXPECTED}")
    args, kwargs = _as_arguments(batch)
    case = TrainCase(name=name, model=model, args=args, kwargs=kwargs, loss_fn=loss_fn, optimizer=optimizer)
    if not case.tensors:
        raise BadInput(f"{name}: the batch it returned is {describe_type(batch)} without tensors; {EXPECTED}")
    if case.rows == 0:
        raise BadInput(f"{name}: the batch it returned is empty: {tuple(case.tensors[0].shape)}.")
    return case


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _on(device: torch.device, case: TrainCase) -> TrainCase:
    """Move what was made on another device; the model in place, as the loss function may hold it."""
    places = {tensor.device for tensor in (*case.model.parameters(), *case.model.buffers())}
    if any(not _is_at(place, device) for place in places):
        try:
            case.model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"{case.name}: the model cannot be moved to {device}: {describe_error(error)}.") from error
    move = partial(_moved, device=device)
    return replace(case, args=tree_map(move, case.args), kwargs=tree_map(move, dict(case.kwargs)))


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) and not _is_at(leaf.device, device) else leaf


def _is_at(place: torch.device, device: torch.device) -> bool:
    """Whether both are the same device; one without an index is the current one."""
    if place.type != device.type or place.type != "cuda":
        return place.type == device.type
    current = torch.cuda.current_device() if None in (place.index, device.index) else None
    return (current if place.index is None else place.index) == (current if device.index is None else device.index)


def _resized(leaf: Any, before: int, after: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != before:
        return leaf
    times = -(-after // before)
    return leaf.repeat(times, *[1] * (leaf.ndim - 1))[:after] if times > 1 else leaf[:after]
