"""The input and output dtypes of each module, in the order in which they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.run_facts import rows

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = ["ModuleDtypes", "count_output_dtypes", "dtype_flow_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDtypes:
    """A module's call in one step, with its dtypes."""

    module: str
    kind: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    parameters: tuple[str, ...]
    autocast: str  # empty: it was off
    calls: int
    is_leaf: bool

    @property
    def changes(self) -> bool:
        """Whether the output dtypes differ from the input dtypes."""
        return bool(self.takes and self.gives) and set(self.takes) != set(self.gives)

    @property
    def depth(self) -> int:
        return self.module.count(".")

    @property
    def format(self) -> str:
        """Output dtype, for a colour: one dtype, "mixed" or "none"."""
        return self.gives[0] if len(self.gives) == 1 else "mixed" if self.gives else "none"


def dtype_flow_of(run: Run) -> list[ModuleDtypes]:
    """Return the recorded modules of one step; an empty list if the run recorded none."""
    found = rows(run, "dtype_flow")
    models = {str(row.get("model") or "") for row in found}
    parents = {(row.get("model"), parent) for row in found for parent in _parents(str(row.get("module") or ""))}
    return [_ran(row, parents, several=len(models) > 1) for row in found]


def _parents(name: str) -> list[str]:
    """Return the names of the modules that contain a module; some of these are never called themselves.

    >>> _parents("blocks.0.norm")
    ['blocks', 'blocks.0']
    """
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def count_output_dtypes(flow: Sequence[ModuleDtypes]) -> str:
    """Count the innermost modules by output dtype."""
    given = Counter(ran.format for ran in flow if ran.is_leaf and ran.gives)
    return ", ".join(f"{count:,} in {name}" for name, count in given.most_common())


def _ran(row: Mapping[str, Any], parents: Set[tuple[object, str]], *, several: bool) -> ModuleDtypes:
    name, model, calls = str(row.get("module") or ""), str(row.get("model") or ""), row.get("calls")
    return ModuleDtypes(
        module=f"{model}: {name}" if several and name != model else name,
        kind=str(row.get("kind") or ""),
        takes=_texts(row.get("takes")),
        gives=_texts(row.get("gives")),
        parameters=_texts(row.get("parameters")),
        autocast=str(row.get("autocast") or ""),
        calls=calls if isinstance(calls, int) else 1,
        is_leaf=name != model and (row.get("model"), name) not in parents,
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
