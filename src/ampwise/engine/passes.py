"""A micro-batch, kept by reference until it is known how its step went: what it takes to run it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ampwise.engine.window import Weight
from ampwise.trace.names import iterators_of
from ampwise.trace.ranges import bytes_of
from ampwise.trace.undo import overwrite

__all__ = ["Pass", "as_given", "drawn_from"]


@dataclass(slots=True)
class Pass:
    """A micro-batch, by reference, and what was when it began."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    factor: Weight | None
    divisor: int
    random: dict[str, Any]
    share: Tensor | None = None  # of the loss, once it is there
    versions: list[tuple[Tensor, int]] = field(init=False)  # of the batch's tensors
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the batch, where it is known to be changed

    def __post_init__(self) -> None:
        tensors = _tensors_in((*self.args, *self.kwargs.values()))
        self.versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def copy_batch(self) -> None:
        """Of a function that changes it, what it is given would be gone."""
        self.copies = [(tensor, tensor.detach().clone()) for tensor, _ in self.versions]

    @property
    def bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor, _ in self.versions)

    @property
    def is_changed(self) -> bool:
        """Its batch was written to since."""
        return any(tensor._version != version for tensor, version in self.versions)


def _tensors_in(given: Iterable[Any]) -> Iterator[Tensor]:
    """Most batches are tensors, for which torch's trees take longer than all else that is kept."""
    for each in given:
        if isinstance(each, Tensor):
            yield each
        else:
            yield from (leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor))


@contextmanager
def as_given(passes: Sequence[Pass]) -> Iterator[None]:
    """Batches as they came, where they were copied, and afterwards as they are."""
    copies = [pair for kept in passes for pair in kept.copies]
    now = [(tensor, tensor.detach().clone()) for tensor, _ in copies]
    for tensor, values in copies:
        overwrite(tensor, values)
    try:
        yield
    finally:
        for tensor, values in now:
            overwrite(tensor, values)


def drawn_from(passes: Sequence[Pass]) -> str:
    """The name of what a loss function takes items from, which running it again would take more of; "" of none."""
    found = (name for kept in passes for name in iterators_of(kept.function, kept.args, kept.kwargs))
    return next(found, "")
