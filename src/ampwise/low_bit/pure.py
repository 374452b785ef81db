"""What "bf16-pure" and what may follow it means."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ampwise.errors import UnknownName

__all__ = ["PURE", "Pure", "names_in", "pure_from"]

PURE = "bf16-pure"
KAHAN, BF16_STATES, ELEMENTWISE = "kahan", "bf16-states", "elementwise"
OPTIONS = {
    KAHAN: "what rounding leaves of each weight is kept in 2 bytes, instead of being rounded by chance",
    BF16_STATES: "what the optimizer keeps of each weight is BF16 too, rounded by chance",
    ELEMENTWISE: "an optimizer that is not torch's treats each parameter by itself, so that a few are done at a time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pure:
    """BF16 weights and gradients, and how small updates are kept from being rounded away.

    >>> Pure(kahan=True).text
    'bf16-pure,kahan'
    """

    kahan: bool = False
    bf16_states: bool = False
    elementwise: bool = False

    @property
    def text(self) -> str:
        """As ``pure_from`` reads it."""
        return ",".join((PURE, *(_option(each.name) for each in fields(self) if getattr(self, each.name))))


def pure_from(text: str) -> Pure:
    """By its text: ``bf16-pure[,kahan][,bf16-states][,elementwise]``.

    >>> pure_from("bf16-pure, kahan") == Pure(kahan=True)
    True
    """
    _, *options = (part.strip() for part in text.split(","))
    for option in options:
        if option not in OPTIONS:
            listed = "; ".join(f"{name} ({meaning})" for name, meaning in OPTIONS.items())
            raise UnknownName(f"option of {PURE}", option, OPTIONS, listing=f"After {PURE} and a comma: {listed}.")
    return Pure(**{each.name: _option(each.name) in options for each in fields(Pure)})


def names_in(text: str) -> list[str]:
    """Names of precisions between commas, where an option belongs to the name before it.

    >>> names_in("bf16, bf16-pure, kahan, fp32")
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
