"""What a precision is chosen for: a model, a batch, and the loss they make, from a function of the user's."""

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
from ampwise.user_code import Named, call, checked_name, failure, function_of, kind, python_path

__all__ = ["EXAMPLE", "Maker", "Subject", "maker_named", "maker_of"]

EXAMPLE = """\
  def make(batch=16):
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)"""
EXPECTED = f"expected is a function that returns the model, a batch and what makes the loss of it:\n{EXAMPLE}"
SIZE_NAMES = ("batch", "batch_size")  # of the parameter that says how many rows a batch is to have


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with a batch to train on, all on one device."""

    name: str
    model: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any]
    optimizer: Optimizer | None = None  # the user's own, where the function returned one

    def loss(self) -> Tensor:
        """A forward pass, which ends in the loss."""
        loss = _loss_in(self.loss_fn(*self.args, **self.kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind(loss)
            raise BadInput(f"{self.name}: the loss is {shown}, not a tensor of one number; {EXPECTED}")
        return loss

    @property
    def parameters(self) -> list[Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the batch, as they come."""
        return [leaf for leaf in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(leaf, Tensor)]

    @property
    def rows(self) -> int | None:
        """How many samples the batch has, by its first tensor; None where that has no dimension."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.ndim), None)

    @property
    def tokens(self) -> int | None:
        """How many tokens, where the batch begins with a matrix of integers."""
        first = next((tensor for tensor in self.tensors if tensor.ndim), None)
        if first is None or first.ndim != 2 or first.is_floating_point() or first.dtype == torch.bool:
            return None
        return first.numel()

    def resized(self, rows: int) -> Subject:
        """The same with a batch of so many rows: tensors that have a row for each sample are cut or repeated."""
        if rows < 1:
            raise BadInput(f"{self.name}: a batch of {rows} rows makes no sense.")
        if self.rows is None:
            raise BadInput(f"{self.name}: its batch has no rows, so there is no other size of it.")
        resize = partial(_resized, before=self.rows, after=rows)
        return replace(self, args=tree_map(resize, self.args), kwargs=tree_map(resize, dict(self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The user's function, which makes a subject anew each time."""

    name: str
    function: Callable[..., Any]
    size_name: str | None  # of the parameter that takes the size of the batch
    named: Named | None = None  # where it was found: what it imports when called is looked for there, too

    @property
    def takes_batch(self) -> bool:
        """Whether the function itself can be told how many rows."""
        return self.size_name is not None

    def make(self, device: torch.device | str = "cpu", batch: int | None = None) -> Subject:
        """Call it; what it makes is made on that device. Where the function takes no size, the batch is resized."""
        if batch is not None and batch < 1:
            raise BadInput(f"{self.name}: a batch of {batch} rows makes no sense.")
        arguments = {} if batch is None or self.size_name is None else {self.size_name: batch}
        with python_path(self.named) if self.named else nullcontext():
            made = self._called(torch.device(device), arguments)
        subject = _on(torch.device(device), _checked(made, self.name))
        return subject if batch is None or subject.rows == batch else subject.resized(batch)

    def _called(self, device: torch.device, arguments: dict[str, int]) -> Any:
        """What the function returns; made on the device if it lets that happen, else where it makes things by itself.

        Some code wants to read what it has made, or draws from a generator of the CPU, as a DataLoader that shuffles.
        """
        once = partial(call, self.name, self.function, self.name.rpartition(":")[2], arguments)
        if device.type == "cpu":
            return once()
        try:
            with device:
                return once()
        except BadInput:
            return once()


def maker_named(text: str) -> Maker:
    """The function that ``train:make`` or ``train.py:make`` names; its module is loaded."""
    named = Named(text, *checked_name(text, ""))
    with python_path(named):
        return replace(maker_of(function_of(named), text), named=named)


def maker_of(function: Callable[..., Any], name: str | None = None) -> Maker:
    """A function that makes model, batch and loss."""
    said = name or str(getattr(function, "__name__", "the function"))
    if not callable(function) or isinstance(function, Module):
        raise BadInput(f"{said}: that is {kind(function)}; {EXPECTED}")
    return Maker(name=said, function=function, size_name=_size_name(function, said))


def _loss_in(returned: Any) -> Any:
    """The loss in what was returned: by itself, first of several, or by its name, as of transformers' models."""
    if isinstance(returned, tuple) and returned and not hasattr(returned, "loss"):
        return returned[0]
    if isinstance(returned, Mapping):
        return returned.get("loss", returned)
    return returned if isinstance(returned, Tensor) else getattr(returned, "loss", returned)


def _size_name(function: Callable[..., Any], said: str) -> str | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is written in C
        return None
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if required:
        raise BadInput(
            f"{said}: it needs arguments ({', '.join(required)}), and is called without: give them defaults. A "
            f"parameter `batch` is told the size of a batch where one is asked for; {EXPECTED}"
        )
    return next((name for name in SIZE_NAMES if name in named), None)


def _checked(made: Any, name: str) -> Subject:
    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 4:
        raise BadInput(f"{name}: it returned {kind(made)}; {EXPECTED}")
    model, batch, *rest = made
    loss_fn = rest[0] if rest and rest[0] is not None else model
    optimizer = rest[1] if len(rest) > 1 else None
    if not isinstance(model, Module):
        raise BadInput(f"{name}: the model that it returned is {kind(model)}; {EXPECTED}")
    if next(model.parameters(), None) is None:
        raise BadInput(f"{name}: the model that it returned has no parameters.")
    if not callable(loss_fn):
        raise BadInput(f"{name}: what makes the loss is {kind(loss_fn)}; {EXPECTED}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise BadInput(f"{name}: the optimizer that it returned is {kind(optimizer)}; {EXPECTED}")
    args, kwargs = _as_arguments(batch)
    subject = Subject(name=name, model=model, args=args, kwargs=kwargs, loss_fn=loss_fn, optimizer=optimizer)
    if not subject.tensors:
        raise BadInput(f"{name}: the batch that it returned is {kind(batch)} without tensors; {EXPECTED}")
    if subject.rows == 0:
        raise BadInput(f"{name}: the batch that it returned is empty: {tuple(subject.tensors[0].shape)}.")
    return subject


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _on(device: torch.device, subject: Subject) -> Subject:
    """What was made elsewhere, by name, is moved; a model in place, as the loss function may hold it."""
    places = {tensor.device for tensor in (*subject.model.parameters(), *subject.model.buffers())}
    if any(not _is_at(place, device) for place in places):
        try:
            subject.model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"{subject.name}: the model cannot be moved to {device}: {failure(error)}.") from error
    move = partial(_moved, device=device)
    return replace(subject, args=tree_map(move, subject.args), kwargs=tree_map(move, dict(subject.kwargs)))


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) and not _is_at(leaf.device, device) else leaf


def _is_at(place: torch.device, device: torch.device) -> bool:
    """Whether both are the same; a device without a number is the current one of its kind."""
    if place.type != device.type or place.type != "cuda":
        return place.type == device.type
    current = torch.cuda.current_device() if None in (place.index, device.index) else None
    return (current if place.index is None else place.index) == (current if device.index is None else device.index)


def _resized(leaf: Any, before: int, after: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != before:
        return leaf
    times = -(-after // before)
    return leaf.repeat(times, *[1] * (leaf.ndim - 1))[:after] if times > 1 else leaf[:after]
