"""What came in bad: whose memory it is, and which of a batch's samples it is in."""

from __future__ import annotations

from math import inf

from torch import Tensor

from ampwise.evidence.incident import Birth, Source
from ampwise.evidence.op_families import family_of
from ampwise.trace.looking import values_of
from ampwise.trace.ranges import local, readable
from ampwise.trace.recorder import storage_id
from ampwise.trace.replay import Subject
from ampwise.trace.slicing import Ancestry
from ampwise.trace.tape import Given

__all__ = ["Origins"]

SHOWN = 8  # samples


class Origins:
    """Memory by whom it belongs to: a view of a batch is the batch's."""

    def __init__(self, subject: Subject) -> None:
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

    def _of(self, given: Given) -> tuple[str, str, Tensor | None]:
        leaf = given.storage.leaf
        return ("other", "", leaf) if leaf is None else self._known.get(storage_id(leaf), ("other", "", leaf))

    def is_unknown(self, given: Given) -> bool:
        """Neither the model's nor the batch's."""
        return self._of(given)[0] == "other"

    def parameter(self, given: Given) -> Tensor | None:
        what, _, tensor = self._of(given)
        return tensor if what == "parameter" else None

    def is_meant(self, given: Given, ancestry: Ancestry) -> bool:
        """Infinities, and no NaN: whether they are there on purpose, as those of a mask."""
        what, name, tensor = self._of(given)
        if what == "parameter" or not ancestry.from_infinities:
            return False
        if what == "buffer":
            is_mask = tensor is not None and not bool((local(tensor) == inf).any())  # masks are of -inf
            return is_mask and not name.rpartition(".")[2].startswith("running_")
        return what == "other" or family_of(ancestry.from_infinities[0].name) == "softmax"

    def source(self, given: Given, first_use: Birth | None) -> Source:
        what, name, tensor = self._of(given)
        rows = _bad_rows(tensor) if what in ("batch", "other") and tensor is not None else []
        return Source(
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
    values = readable(local(tensor))
    if values is None or not values.dim():
        return []
    bad = values.isfinite().logical_not().reshape(len(values), -1).any(-1)
    rows: list[int] = bad.nonzero().flatten().tolist()
    return rows
