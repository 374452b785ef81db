"""The precision "bf16-pure" and its options."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ampwise.errors import UnknownName

__all__ = ["PURE", "PureBf16", "parse_pure_bf16", "split_precisions"]

PURE = "bf16-pure"
KAHAN, BF16_STATES, ELEMENTWISE = "kahan", "bf16-states", "elementwise"
OPTIONS = {
    KAHAN: "keep the rounding remainder of each weight in 2 bytes, instead of stochastic rounding",
    BF16_STATES: "keep the optimizer's state in BF16 too, rounded stochastically",
    ELEMENTWISE: "treat an optimizer that is not torch's as elementwise, so that it can be stepped in chunks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PureBf16:
    """Options of "bf16-pure": BF16 weights and gradients, and how small updates survive rounding.

    >>> PureBf16(kahan=True).text
    'bf16-pure,kahan'
    """

    kahan: bool = False
    bf16_states: bool = False
    elementwise: bool = False

    @property
    def text(self) -> str:
        """Text that ``parse_pure_bf16`` parses."""
        return ",".join((PURE, *(_option(each.name) for each in fields(self) if getattr(self, each.name))))


def parse_pure_bf16(text: str) -> PureBf16:
    """Parse ``bf16-pure[,kahan][,bf16-states][,elementwise]``.

    >>> parse_pure_bf16("bf16-pure, kahan") == PureBf16(kahan=True)
    True
    """
    _, *options = (part.strip() for part in text.split(","))
    for option in options:
        if option not in OPTIONS:
            listed = "; ".join(f"{name} ({meaning})" for name, meaning in OPTIONS.items())
            raise UnknownName(f"option of {PURE}", option, OPTIONS, listing=f"After {PURE} and a comma: {listed}.")
    return PureBf16(**{each.name: _option(each.name) in options for each in fields(PureBf16)})


def split_precisions(text: str) -> list[str]:
    """Split a comma-separated list of precisions; an option belongs to the name before it.

    >>> split_precisions("bf16, bf16-pure, kahan, fp32")
    ['bf16', 'bf16-pure,kahan', 'fp32']
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part in OPTIONS and names and names[-1].startswith(PURE):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def _option(field: str) -> str:
    return field.replace("_", "-")
