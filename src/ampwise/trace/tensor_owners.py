"""Describe a bad input: which parameter, buffer or batch tensor it is, and which samples of a batch are bad."""

from __future__ import annotations

from math import inf

from torch import Tensor

from ampwise.numbers.op_families import family_of
from ampwise.trace.failure import BadTensor, Origin
from ampwise.trace.op_inspection import values_of
from ampwise.trace.recorder import storage_id
from ampwise.trace.replay import ReplayStep
from ampwise.trace.slicing import BackwardSlice
from ampwise.trace.tape import TensorRead
from ampwise.trace.value_ranges import local_shard, readable_values

__all__ = ["TensorOwners"]

SHOWN = 8  # samples


class TensorOwners:
    """The owner of each storage: a parameter, a buffer or the batch; a view of a batch belongs to the batch."""

    def __init__(self, subject: ReplayStep) -> None:
        self._subject = subject
        self._known: dict[int, tuple[str, str, Tensor | None]] = {}
        for what, named in (
            ("batch", subject.batch),
            ("buffer", subject.of_others("named_buffers")),
            ("parameter", subject.of_others("named_parameters")),
            ("buffer", subject.buffers()),
            ("parameter", subject.parameters()),
        ):
            for name, tensor in named.items():
                self._known[storage_id(tensor)] = what, name, tensor

    def _owner(self, given: TensorRead) -> tuple[str, str, Tensor | None]:
        leaf = given.storage.leaf
        return ("other", "", leaf) if leaf is None else self._known.get(storage_id(leaf), ("other", "", leaf))

    def is_unknown(self, given: TensorRead) -> bool:
        """Return whether the memory belongs to neither the model nor the batch."""
        return self._owner(given)[0] == "other"

    def parameter(self, given: TensorRead) -> Tensor | None:
        """Return the parameter that owns the memory, if one does."""
        what, _, tensor = self._owner(given)
        return tensor if what == "parameter" else None

    def is_intended(self, given: TensorRead, ancestry: BackwardSlice) -> bool:
        """Return whether infinities (without NaN) are there on purpose, as in a mask."""
        what, name, tensor = self._owner(given)
        if what == "parameter" or not ancestry.from_infinities:
            return False
        if what == "buffer":
            is_mask = tensor is not None and not bool((local_shard(tensor) == inf).any())  # masks hold -inf, not inf
            return is_mask and not name.rpartition(".")[2].startswith("running_")
        return what == "other" or family_of(ancestry.from_infinities[0].name) == "softmax"

    def source(self, given: TensorRead, first_use: Origin | None) -> BadTensor:
        """Describe a bad input and the operation that read it first."""
        what, name, tensor = self._owner(given)
        rows = _bad_rows(tensor) if what in ("batch", "other") and tensor is not None else []
        return BadTensor(
            what=what,
            name=name,
            values=None if tensor is None else values_of(tensor),
            module_class=self._class_of(name) if what in ("buffer", "parameter") else "",
            rows=tuple(rows[:SHOWN]),
            bad_rows=len(rows),
            first_use=first_use,
        )

    def _class_of(self, name: str) -> str:
        path = name.rpartition(".")[0]
        for model in self._subject.models:
            for other, module in model.named_modules():
                if other == path:
                    return type(module).__name__
        return ""


def _bad_rows(tensor: Tensor) -> list[int]:
    values = readable_values(local_shard(tensor))
    if values is None or not values.dim():
        return []
    bad = values.isfinite().logical_not().reshape(len(values), -1).any(-1)
    rows: list[int] = bad.nonzero().flatten().tolist()
    return rows
