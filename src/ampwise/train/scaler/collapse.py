"""Error and warning for gradients that still overflow with the loss scale at its minimum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from ampwise.errors import ScaleCollapsed
from ampwise.finding.terminal import printable
from ampwise.numbers.census.algebra import Census

__all__ = ["SKIPS_BEFORE_WARNING", "collapse_error", "warn_about_skips"]

SHOWN = 3  # parameters by name
SKIPS_BEFORE_WARNING = (
    30  # skips in a row before a warning, without a loss scale: as many as FP16 needs to reach its minimum
)


def collapse_error(floor: float, in_a_row: int, censuses: Mapping[str, Census]) -> ScaleCollapsed:
    """Return the error, with the probable cause read from the last step's gradients."""
    steps = "a step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    way_out = "A lower scale would not help: look for inf or NaN in the forward pass, or train in BF16."
    if floor >= 1:
        way_out = f"A min_scale of {floor:g} is high: try a lower one first."
    return ScaleCollapsed(
        f"GradScaler: gradients overflowed with the loss scale at its floor, min_scale={floor:g}, for {steps}. "
        f"The weights are unchanged. {_cause(censuses)} {way_out}"
    )


def warn_about_skips(in_a_row: int, censuses: Mapping[str, Census]) -> None:
    """Warn that all steps are being skipped."""
    warnings.warn(
        printable(
            f"GradScaler: {in_a_row} steps in a row were skipped because gradients are not finite. {_cause(censuses)} "
            "Look for inf or NaN in the data, the loss or the weights."
        ),
        RuntimeWarning,
        stacklevel=4,
    )


def _cause(censuses: Mapping[str, Census]) -> str:
    bad = [name for name, census in censuses.items() if not census.finite]
    if not censuses:  # no census on this device
        return ""
    if not bad:
        return "The gradients of the last step are finite again."
    if len(bad) == len(censuses):
        have = f"All {len(bad)} gradients have" if len(bad) > 1 else "The only gradient has"
        return f"{have} inf or NaN in {'them' if len(bad) > 1 else 'it'}, so the loss itself was probably not finite."
    first, total = bad[-1], len(censuses)
    shown = []
    for name in bad[-SHOWN:]:
        kinds = ((censuses[name].infs, "inf"), (censuses[name].nans, "NaN"))
        shown.append(f"{_shown(name)} ({' and '.join(f'{count} {kind}' for count, kind in kinds if count)})")
    counts = ", ".join(shown)
    return (
        f"{len(bad)} of {total} gradients have inf or NaN in them; the last ones in parameter order: {counts}. "
        f"Backward runs from the last layer to the first, so look at {_shown(first)} or just after it."
    )


def _shown(name: str) -> str:
    """Return a parameter's name, or its group and index in an optimizer without names."""
    group, _, index = name.rpartition(":")[2].partition(".")
    return f"parameter {index} of group {group}" if group.isdigit() and index.isdigit() else name
