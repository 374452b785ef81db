"""A model, a batch and the loss function to train, made by a user's function, and a training step on them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader

from ampwise.check.source.script import UnreadableFile, read_script
from ampwise.errors import BadInput, UnknownName
from ampwise.trace.user_code import (
    UserFunction,
    call_user_function,
    describe_error,
    describe_type,
    load_function,
    python_path_of,
    split_function_name,
)
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import choose_precision
from ampwise.tune.init.reading import Script

EXPECTED = (
    "expected a function that returns the model, a batch and the loss function, such as "
    "`return net, (x, y), lambda x, y: F.cross_entropy(net(x), y)`. `ampwise init train.py` writes one."
)
# How torch says that tensors do not fit: shapes, numbers of arguments, indices.
DOES_NOT_FIT = re.compile(
    r"shapes? .*(cannot be multiplied|invalid|incompatible)|size of tensor|must match|mismatch|expected input|"
    r"Expected input|expected \d\w*D|Expected \d\w*D|out of (range|bounds)|positional argument|keyword argument|"
    r"missing \d+ required|view size|is invalid for input of size"
)
SIZE_NAMES = ("batch", "batch_size")  # parameter that sets the number of rows
LR = 1e-5  # so small that the model stays sensible while it is measured

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """A model with a batch to train on, all on one device."""

    name: str
    model: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any]
    optimizer: Optimizer | None = None  # the user's own, if the function returned one
    batches: Iterable[Any] | None = None  # more of them, if it returned a DataLoader or an iterator
    held_back: Iterable[Any] | None = None  # if it returned a pair of those

    def loss(self) -> Tensor:
        """Run a forward pass, and return the loss."""
        try:
            returned = self.loss_fn(*self.args, **self.kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            if not DOES_NOT_FIT.search(str(error)) or isinstance(error, torch.OutOfMemoryError):
                raise
            shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in self.tensors)
            raise BadInput(
                f"{self.name}: the batch ({shapes}) does not fit the loss function: {describe_error(error)}. "
                "The batch is passed as its arguments, a dict as keywords: make its sizes those of your data."
            ) from error
        # The loss is the result itself, the first of several, or found by its name, as in transformers.
        if isinstance(returned, tuple) and returned and not hasattr(returned, "loss"):
            loss = returned[0]
        elif isinstance(returned, Mapping):
            loss = returned.get("loss", returned)
        else:
            loss = returned if isinstance(returned, Tensor) else getattr(returned, "loss", returned)
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
        before, times = self.rows, -(-rows // self.rows)

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != before:
                return leaf
            return leaf.repeat(times, *[1] * (leaf.ndim - 1))[:rows] if times > 1 else leaf[:rows]

        return replace(self, args=tree_map(resize, self.args), kwargs=tree_map(resize, dict(self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFactory:
    """The user's function, which makes a new case each time."""

    name: str
    function: Callable[..., Any]
    size_name: str | None  # name of the parameter for the batch size
    named: UserFunction | None = None  # where it was found: its imports are resolved there, too

    def make(self, device: torch.device | str = "cpu", batch: int | None = None) -> TrainCase:
        """Call the function, on that device. If it takes no size, the batch is resized."""
        if batch is not None and batch < 1:
            raise BadInput(f"{self.name}: expected a batch of at least 1 row, got {batch}.")
        arguments = {} if batch is None or self.size_name is None else {self.size_name: batch}
        once = partial(call_user_function, self.name, self.function, self.name.rpartition(":")[2], arguments)
        device = torch.device(device)
        with python_path_of(self.named) if self.named else nullcontext():
            try:
                with nullcontext() if device.type == "cpu" else device:
                    made = once()
            except BadInput:
                if device.type == "cpu":
                    raise
                # Some code reads what it has made, or draws from a CPU generator, as a shuffling DataLoader does.
                made = once()
        case = _on(device, _checked(made, self.name))
        return case if batch is None or case.rows == batch else case.resized(batch)


def load_factory(text: str) -> CaseFactory:
    """Load the function named by ``train:make`` or ``train.py:make``, with its module."""
    named = UserFunction(text, *split_function_name(text, ""))
    _refuse_training_on_import(named)
    with python_path_of(named):
        return replace(make_factory(load_function(named), text), named=named)


def _refuse_training_on_import(named: UserFunction) -> None:
    """Refuse a script that would train before its function can be called."""
    file = named.place if named.place.endswith(".py") else f"{named.place.replace('.', '/')}.py"
    if named.place.partition(".")[0] in sys.modules or not Path(file).is_file():
        return
    try:
        found = Script(read_script(file)).training_on_import
    except UnreadableFile:
        return  # importing it says more
    if found is not None:
        raise BadInput(
            f"{named.said}: {file} trains when it is imported (line {found[0]}: {found[1]}). Put that under "
            f'`if __name__ == "__main__":`, or let `ampwise init {file}` write a function without it.'
        )


def make_factory(function: Callable[..., Any] | str, name: str | None = None) -> CaseFactory:
    """Wrap a function that makes model, batch and loss, given itself or by name, as for ``load_factory``."""
    if isinstance(function, str):
        return load_factory(function)
    label = name or str(getattr(function, "__name__", "the function"))
    if not callable(function) or isinstance(function, Module):
        raise BadInput(f"{label}: got {describe_type(function)}; {EXPECTED}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return CaseFactory(name=label, function=function, size_name=None)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if required:
        raise BadInput(
            f"{label}: it must be callable without arguments, but requires {', '.join(required)}: give them defaults. "
            f"A parameter `batch` receives the batch size; {EXPECTED}"
        )
    named = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    size_name = next((name for name in SIZE_NAMES if name in named), None)
    return CaseFactory(name=label, function=function, size_name=size_name)


def _checked(made: Any, name: str) -> TrainCase:
    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 4:
        raise BadInput(f"{name}: it returned {describe_type(made)}; {EXPECTED}")
    model, batch, *rest = made
    loss_fn = rest[0] if rest and rest[0] is not None else model
    optimizer = rest[1] if len(rest) > 1 else None
    if not isinstance(model, Module):
        raise BadInput(f"{name}: it returned {describe_type(model)} as the model; {EXPECTED}")
    if next(model.parameters(), None) is None:
        raise BadInput(
            f"{name}: the model it returned, {describe_type(model)}, has no parameters, so there is nothing to train: "
            "return the module that holds the weights."
        )
    if not callable(loss_fn):
        raise BadInput(f"{name}: it returned {describe_type(loss_fn)} as the loss function; {EXPECTED}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise BadInput(f"{name}: it returned {describe_type(optimizer)} as the optimizer; {EXPECTED}")
    batches = held_back = None
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], DataLoader | Iterator):
        batches, held_back = batch
    elif isinstance(batch, DataLoader | Iterator):
        batches = batch
    if batches is not None:
        first = [*islice(batches, 1)]
        if not first:
            raise BadInput(f"{name}: the DataLoader or iterator it returned as the batch is empty; {EXPECTED}")
        batch = first[0]
        batches = chain(first, batches) if isinstance(batches, Iterator) else batches
    args, kwargs = arguments_of(batch)
    case = TrainCase(
        name=name, model=model, args=args, kwargs=kwargs, loss_fn=loss_fn, optimizer=optimizer, batches=batches,
        held_back=held_back,
    )  # fmt: skip
    if not case.tensors:
        raise BadInput(f"{name}: the batch it returned is {describe_type(batch)} without tensors; {EXPECTED}")
    if case.rows == 0:
        raise BadInput(f"{name}: the batch it returned is empty: {tuple(case.tensors[0].shape)}.")
    return case


def _on(device: torch.device, case: TrainCase) -> TrainCase:
    """Move what was made on another device; the model in place, as the loss function may hold it."""
    places = {tensor.device for tensor in (*case.model.parameters(), *case.model.buffers())}
    if any(not _is_at(place, device) for place in places):
        try:
            case.model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"{case.name}: the model cannot be moved to {device}: {describe_error(error)}.") from error

    return replace(case, args=moved(case.args, device), kwargs=moved(dict(case.kwargs), device))


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments of the loss function, and as keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def moved(values: Any, device: torch.device) -> Any:
    """Return values with their tensors on a device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and not _is_at(leaf.device, device) else leaf

    return tree_map(move, values)


def _is_at(place: torch.device, device: torch.device) -> bool:
    """Whether both are the same device; one without an index is the current one."""
    if place.type != device.type or place.type != "cuda":
        return place.type == device.type
    current = torch.cuda.current_device() if None in (place.index, device.index) else None
    return (current if place.index is None else place.index) == (current if device.index is None else device.index)


def make_optimizer(name: str, parameters: Iterable[Parameter], *, fused: bool, lr: float = LR) -> Optimizer:
    """Make an optimizer by name."""
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS, listing=f"There are {', '.join(OPTIMIZERS)}.")
    trained = list(parameters)
    if not trained:
        raise BadInput("the model has no trainable parameter: each has requires_grad=False.")
    return OPTIMIZERS[name](trained, lr=lr, fused=fused)


class TrainingStep:
    """Train a step when called: forward, backward, clip, optimizer, clear gradients. Return the loss.

    It uses torch alone, as a plain training loop does: autocast, torch's GradScaler where the precision
    needs one, ``clip_grad_norm_``. Steps of several precisions may take turns on one model and one optimizer.
    """

    def __init__(
        self,
        case: TrainCase,
        precision: str | Policy,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = 1.0,
        compiled: bool = False,
    ) -> None:
        self._policy_applied: AbstractContextManager[Any] = nullcontext()
        if isinstance(precision, Policy):
            with precision.apply(case.model) as self._policy_applied:
                precision = precision.base
        self.precision = choose_precision(precision, case.device).precision
        self.case, self.optimizer = case, optimizer
        self._clip_norm = clip_norm
        self._parameters = case.parameters
        self._arithmetic = PrecisionContexts(self.precision, case.device.type)
        loss_fn = torch.compile(_copy_with_own_code(case.loss_fn), dynamic=False) if compiled else case.loss_fn
        self._loss = replace(case, loss_fn=loss_fn).loss
        self._scaler: Any = torch.amp.GradScaler(case.device.type, enabled=self.precision.scaled)

    def __call__(self) -> Tensor:
        loss = self.forward_and_backward()
        self.update()
        return loss

    def in_place(self) -> AbstractContextManager[Any]:
        """Apply the precision's policy, if it has one, while inside; call steps there."""
        return self._policy_applied

    def forward_and_backward(self) -> Tensor:
        """Run forward and backward; gradients stay scaled."""
        with self._arithmetic.pass_context():
            with self._arithmetic.forward():
                loss = self._loss()
            with self._arithmetic.backward():
                self._scaler.scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """Unscale, clip, step the optimizer and clear gradients."""
        if self._clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _copy_with_own_code(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the function with its own code object.

    Compiled versions are cached per code object, a few for each: several precisions and comparisons would soon make
    too many, and torch would stop compiling.
    """

    def loss(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **kwargs)

    loss.__code__ = loss.__code__.replace()
    return loss
