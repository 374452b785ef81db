"""The formats to choose among, and how a module runs in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampwise.errors import BadInput
from ampwise.numbers.emulation.recipe import UP, EmulationRecipe, recipe_for_format, with_scales_rounded_up
from ampwise.numbers.formats import BlockFormat, Format, find_format
from ampwise.train.precision.call_in_precision import REGIONS

__all__ = ["DEFAULT_FORMATS", "WIDEST", "FormatChoice", "parse_formats"]

DEFAULT_FORMATS = ("e4m3", "bf16", "fp32")
WIDEST = "fp32"
MOST_BITS = 9  # of an emulated format: 8, and a block's share of its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """A format that a module may have.

    A format of 8 bits or fewer is emulated in a 16-bit region, as in FP8 training: inputs and outputs have 16 bits, and
    only the matmuls read fewer.
    """

    name: str
    bits: float  # of an operand
    region: str
    recipe: EmulationRecipe | None = None

    @property
    def narrow(self) -> bool:
        """Whether it is emulated."""
        return self.recipe is not None

    @property
    def peak(self) -> str:
        """The name of its tensor-core peak in the hardware catalog.

        >>> [choice.peak for choice in parse_formats(["e4m3", "mxfp8", "bf16", "fp32"])]
        ['fp8', 'mxfp8', 'bf16', 'fp32']
        """
        if self.recipe is None:
            return self.name
        fmt = self.recipe.forward
        return fmt.name.partition("_")[0] if isinstance(fmt, BlockFormat) else f"fp{fmt.bits}"


def parse_formats(names: Iterable[str]) -> tuple[FormatChoice, ...]:
    """Parse format names and sort them by bits, narrowest first; equal ones in the order given.

    "mxfp8+up" is MXFP8 with scales that are rounded up.

    >>> [choice.name for choice in parse_formats(("fp32", "bf16", "mxfp8+up"))]
    ['mxfp8+up', 'bf16', 'fp32']
    """
    given = [names] if isinstance(names, str) else list(names)
    found = [(_checked(name, given), name) for name in given]
    twice = next((name for place, (fmt, name) in enumerate(found) if fmt in [one for one, _ in found[:place]]), None)
    if twice is not None:
        raise BadInput(f"search(formats=...): {twice!r} is listed twice.")
    if WIDEST not in [fmt.name for fmt, _ in found] or len(found) < 2:
        raise BadInput(
            f"search(formats={tuple(given)!r}): expected {WIDEST!r}, for what must stay wide, and a narrower one, "
            f"such as {DEFAULT_FORMATS!r}."
        )
    regions = [fmt.name for fmt, _ in found]
    # FP8 hardware has BF16 inputs and outputs; FP16 is used only if BF16 is not among the formats.
    carrier = "fp16" if "fp16" in regions and "bf16" not in regions else "bf16"
    return tuple(sorted((_choice(fmt, name, carrier) for fmt, name in found), key=lambda choice: choice.bits))


def _checked(name: object, given: list[str]) -> Format | BlockFormat:
    if not isinstance(name, str):
        raise BadInput(f"search(formats={given!r}): expected names of formats, such as {DEFAULT_FORMATS!r}.")
    fmt = _format(name)
    if fmt.name == "tf32":
        raise BadInput(
            "search(formats=...): TF32 is set for a whole device, not for a module. Here fp32 means FP32 without TF32."
        )
    if fmt.name not in REGIONS and _bits(fmt) > MOST_BITS:
        raise BadInput(
            f"search(formats=...): {fmt.name} is not used for training at speed; {WIDEST!r} is the widest here."
        )
    return fmt


def _format(name: str) -> Format | BlockFormat:
    base, plus, word = name.partition("+")
    fmt = find_format(base)
    if not plus:
        return fmt
    up = with_scales_rounded_up(fmt)
    if word.strip().lower() != UP or up == fmt:
        raise BadInput(f"search(formats=...): {name!r}: only {UP!r} may follow a plus, for MX formats: 'mxfp8+up'.")
    return up


def _choice(fmt: Format | BlockFormat, asked: str, carrier: str) -> FormatChoice:
    if fmt.name in REGIONS:
        return FormatChoice(name=fmt.name, bits=_bits(fmt), region=fmt.name)
    return FormatChoice(name=asked.strip().lower(), bits=_bits(fmt), region=carrier, recipe=recipe_for_format(fmt))


def _bits(fmt: Format | BlockFormat) -> float:
    return fmt.bits_per_value if isinstance(fmt, BlockFormat) else fmt.bits
