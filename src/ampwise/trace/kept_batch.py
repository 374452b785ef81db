"""A micro-batch, kept by reference until its step is known to be good, so that a bad step can be run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ampwise.trace.call_arguments import iterator_names
from ampwise.trace.undo import overwrite
from ampwise.trace.value_ranges import bytes_of
from ampwise.train.callback import MicroBatch

__all__ = ["KeptBatch", "iterator_read_by", "original_batches"]


@dataclass(slots=True)
class KeptBatch:
    """A micro-batch by reference, and the random state when it began."""

    batch: MicroBatch
    random: dict[str, Any]
    share: Tensor | None = None  # contribution to the step's loss, once it is computed
    versions: list[tuple[Tensor, int]] = field(init=False)  # the batch's tensors, with their version counters
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the batch, if the loss function changes it

    def __post_init__(self) -> None:
        tensors = _tensors_in((*self.batch.args, *self.batch.kwargs.values()))
        self.versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def copy_batch(self) -> None:
        """Copy the batch, for a loss function that changes it in place."""
        self.copies = [(tensor, tensor.detach().clone()) for tensor, _ in self.versions]

    @property
    def bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor, _ in self.versions)

    @property
    def is_changed(self) -> bool:
        """Whether the batch was written to since."""
        return any(tensor._version != version for tensor, version in self.versions)


def _tensors_in(given: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in a batch. Plain tensors skip torch's pytree, which would dominate the cost here."""
    for each in given:
        if isinstance(each, Tensor):
            yield each
        else:
            yield from (leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor))


@contextmanager
def original_batches(passes: Sequence[KeptBatch]) -> Iterator[None]:
    """Restore copied batches to their original values inside the context, and undo that afterwards."""
    copies = [pair for kept in passes for pair in kept.copies]
    now = [(tensor, tensor.detach().clone()) for tensor, _ in copies]
    for tensor, values in copies:
        overwrite(tensor, values)
    try:
        yield
    finally:
        for tensor, values in now:
            overwrite(tensor, values)


def iterator_read_by(passes: Sequence[KeptBatch]) -> str:
    """Return the name of an iterator that a loss function reads from, which a rerun would advance; "" if none."""
    found = (
        name for kept in passes for name in iterator_names(kept.batch.function, kept.batch.args, kept.batch.kwargs)
    )
    return next(found, "")
