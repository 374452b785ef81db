"""The formats to choose among, and how a module is run in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampwise.emulation.recipe import UP, Recipe, recipe_named, scaled_up
from ampwise.engine.precision.region import REGIONS
from ampwise.errors import BadInput
from ampwise.formats import BlockFormat, Format, find_format

__all__ = ["DEFAULT_FORMATS", "WIDEST", "Choice", "choices_of"]

DEFAULT_FORMATS = ("e4m3", "bf16", "fp32")
WIDEST = "fp32"
MOST_BITS = 9  # of a format that is emulated: 8, and a block's share of its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format that a module may have. One of 8 bits or fewer is emulated in a region of 16 bits, as FP8 training is:
    what goes in and comes out has 16 bits, and only the products read fewer."""

    name: str
    bits: float  # of an operand
    region: str
    recipe: Recipe | None = None

    @property
    def narrow(self) -> bool:
        """Whether it is emulated."""
        return self.recipe is not None

    @property
    def peak(self) -> str:
        """What a catalog of hardware calls the matrix units for it.

        >>> [choice.peak for choice in choices_of(["e4m3", "mxfp8", "bf16", "fp32"])]
        ['fp8', 'mxfp8', 'bf16', 'fp32']
        """
        if self.recipe is None:
            return self.name
        fmt = self.recipe.forward
        return fmt.name.partition("_")[0] if isinstance(fmt, BlockFormat) else f"fp{fmt.bits}"


def choices_of(names: Iterable[str]) -> tuple[Choice, ...]:
    """The formats of these names, the one with the fewest bits first; of equals, in the order given.

    "mxfp8+up" is MXFP8 with scales that are rounded up.

    >>> [choice.name for choice in choices_of(("fp32", "bf16", "mxfp8+up"))]
    ['mxfp8+up', 'bf16', 'fp32']
    """
    given = [names] if isinstance(names, str) else list(names)
    found = [(_checked(name, given), name) for name in given]
    twice = next((name for place, (fmt, name) in enumerate(found) if fmt in [one for one, _ in found[:place]]), None)
    if twice is not None:
        raise BadInput(f"search(formats=...): {twice!r} is there twice.")
    if WIDEST not in [fmt.name for fmt, _ in found] or len(found) < 2:
        raise BadInput(
            f"search(formats={tuple(given)!r}): there have to be {WIDEST!r}, for what must stay wide, and a narrower "
            f"one, such as {DEFAULT_FORMATS!r}."
        )
    regions = [fmt.name for fmt, _ in found]
    # FP8 hardware has BF16 around its products; FP16 only where nothing else was asked for.
    carrier = "fp16" if "fp16" in regions and "bf16" not in regions else "bf16"
    return tuple(sorted((_choice(fmt, name, carrier) for fmt, name in found), key=lambda choice: choice.bits))


def _checked(name: object, given: list[str]) -> Format | BlockFormat:
    if not isinstance(name, str):
        raise BadInput(f"search(formats={given!r}): names of formats are expected, such as {DEFAULT_FORMATS!r}.")
    fmt = _format(name)
    if fmt.name == "tf32":
        raise BadInput(
            "search(formats=...): TF32 is switched for a whole device, not for a module. FP32 here is FP32 itself."
        )
    if fmt.name not in REGIONS and _bits(fmt) > MOST_BITS:
        raise BadInput(
            f"search(formats=...): nothing is trained in {fmt.name} for speed; {WIDEST!r} is the widest here."
        )
    return fmt


def _format(name: str) -> Format | BlockFormat:
    base, plus, word = name.partition("+")
    fmt = find_format(base)
    if not plus:
        return fmt
    up = scaled_up(fmt)
    if word.strip().lower() != UP or up == fmt:
        raise BadInput(f"search(formats=...): {name!r}: after a plus there may be {UP!r}, for MX formats: 'mxfp8+up'.")
    return up


def _choice(fmt: Format | BlockFormat, asked: str, carrier: str) -> Choice:
    if fmt.name in REGIONS:
        return Choice(name=fmt.name, bits=_bits(fmt), region=fmt.name)
    return Choice(name=asked.strip().lower(), bits=_bits(fmt), region=carrier, recipe=recipe_named(fmt))


def _bits(fmt: Format | BlockFormat) -> float:
    return fmt.bits_per_value if isinstance(fmt, BlockFormat) else fmt.bits
