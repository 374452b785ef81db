"""Compare number formats: range, precision, bits.

Without a NAME, all formats are listed; with NAMEs, those are compared in detail. Aliases work: fp16, half,
float16 and torch.float16 are the same format.

A format has two smallest numbers. Down to the smallest normal (tiny in torch.finfo), values keep their
precision. From there down to the smallest subnormal they lose it bit by bit. At or below half of that, they
round to zero.

Examples:
  ampwise formats
  ampwise formats fp16 bf16
  ampwise formats fp8 e5m2 mxfp8
  ampwise formats fp16 --json | jq '.[0].smallest_subnormal'
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.cli import print_json
from ampwise.finding import terminal
from ampwise.numbers.formats.format import short_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ampwise.numbers.formats import BlockFormat, Format

GROUP = "Look up"
# Letter, meaning and colour of the parts of a number, from its highest bit down.
PARTS = (("S", "sign", "black on red"), ("E", "exponent", "black on green"), ("M", "mantissa", "black on cyan"))
GAP = 2  # blanks between columns
WIDTH_FOR_HARDWARE = 105  # of the table of numbers, with the hardware as its last column
WIDEST_COLUMN = 28  # of a format's details; what is longer wraps

NOTES = (
    "Below the smallest normal a value loses precision; at or below half the smallest subnormal it is zero.",
    "Needs scaling: what must be scaled so that gradients do not underflow: the loss, each tensor or each block.",
    "`ampwise formats NAME NAME` compares in detail.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="a format (default: an overview of all)")
    parser.add_argument("--json", action="store_true", help="JSON, as `ampwise schema formats` describes it")


def run(args: argparse.Namespace) -> int:
    from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, BlockFormat, find_format

    named = [find_format(name) for name in args.names] or [*FORMATS.values(), *BLOCK_FORMATS.values()]
    chosen = list({fmt.name: fmt for fmt in named}.values())  # "half" and "fp16" are one
    if args.json:
        print_json([fmt.as_dict() for fmt in chosen])
        return 0
    scalars = [fmt for fmt in chosen if not isinstance(fmt, BlockFormat)]
    blocks = [fmt for fmt in chosen if isinstance(fmt, BlockFormat)]
    show = _show_details if args.names else _show_overview
    terminal.print_tables(lambda out: show(out, scalars, blocks))
    return 0


def _show_overview(out: Console, scalars: Sequence[Format], blocks: Sequence[BlockFormat]) -> None:
    """Print all formats: a drawing, a table of numbers, a table of block formats."""
    _draw(out, scalars)
    numbers = terminal.table("format")
    for heading in ("largest", "smallest\nnormal", "smallest\nsubnormal", "epsilon", "decimal\ndigits"):
        numbers.add_column(heading, justify="right", no_wrap=True)
    numbers.add_column("needs\nscaling", no_wrap=True)
    hardware = terminal.table("format", "tensor cores since")
    wide = out.width >= WIDTH_FOR_HARDWARE
    if wide:
        numbers.add_column("tensor cores since", no_wrap=True)
    for fmt in scalars:
        figures = map(short_number, (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon))
        since = [fmt.since] if wide else []
        numbers.add_row(fmt.name, *figures, f"{fmt.decimal_digits:.1f}", _scaling(fmt), *since)
        hardware.add_row(fmt.name, fmt.since)
    of_blocks = terminal.table("block format", "element", "scale")
    of_blocks.add_column("block\nsize", justify="right", no_wrap=True)
    of_blocks.add_column("bits per\nvalue", justify="right", no_wrap=True)
    of_blocks.add_column("tensor cores since")
    for block in blocks:
        bits = f"{block.bits_per_value:g}"
        of_blocks.add_row(block.name, block.element.name, _scale(block), str(block.block_size), bits, block.since)
    for table in (numbers, of_blocks) if wide else (numbers, hardware, of_blocks):
        out.print()
        out.print(table)
    out.print()
    for line in NOTES:
        out.print(line, style="dim")


def _show_details(out: Console, scalars: Sequence[Format], blocks: Sequence[BlockFormat]) -> None:
    """Print named formats: a drawing, then one column per format, as many side by side as fit the terminal."""
    from rich.text import Text

    _draw(out, list(dict.fromkeys([*scalars, *(part for fmt in blocks for part in (fmt.element, fmt.scale))])))
    for columns in ([_scalar_details(fmt) for fmt in scalars], [_block_details(fmt) for fmt in blocks]):
        while columns:
            count, width = 1, _width(columns[0])
            labels = max(map(len, columns[0]))
            while count < len(columns) and labels + width + _width(columns[count]) <= out.width:
                width += _width(columns[count])
                count += 1
            table = terminal.table("")
            table.show_header = False
            table.columns[0].style = "dim"
            for _ in range(count):
                table.add_column(max_width=WIDEST_COLUMN)
            for label in columns[0]:
                table.add_row(label, *(facts[label] for facts in columns[:count]), style="" if label else "bold")
            out.print()
            out.print(table)
            columns = columns[count:]
    out.print()
    for title, training in [(fmt.title, fmt.training) for fmt in scalars] + [(b.title, b.training) for b in blocks]:
        out.print(Text.assemble((f"{title}: ", "bold"), training))


def _width(column: dict[str, str]) -> int:
    return GAP + min(WIDEST_COLUMN, max(map(len, column.values())))


def _scalar_details(fmt: Format) -> dict[str, str]:
    subnormal, largest = fmt.smallest_subnormal, short_number(fmt.max)
    if fmt.flush_exponent is None:
        flushes = "never: it has no zero"
    else:
        threshold = math.ldexp(1.0, fmt.flush_exponent)  # FP64's is too small for a float
        flushes = with_power(threshold) if threshold else f"2^{fmt.flush_exponent}"
    becomes, beyond = "infinity" if fmt.infinities else "NaN", short_number(fmt.overflow_threshold)
    if not (fmt.infinities or fmt.nans):
        overflows = f"never: stays at {largest}"
    elif math.isinf(fmt.overflow_threshold) or beyond == largest:
        overflows = f"past the largest: {becomes}"
    else:
        overflows = f"{'from' if fmt.overflow_at_threshold else 'above'} {beyond}: {becomes}"
    return {
        "": fmt.title,
        "name": fmt.name,
        "bits": f"{fmt.bits}{f', stored in {fmt.storage_bits}' if fmt.storage_bits else ''}",
        "codes": f"{fmt.codes:,}" if fmt.bits <= 32 else f"2^{fmt.bits}",
        "bias": str(fmt.bias),
        "largest": largest,
        "smallest normal": with_power(fmt.smallest_normal),
        "smallest subnormal": "none" if subnormal is None else with_power(subnormal),
        "zero at or below": flushes,
        "overflows": overflows,
        "epsilon": with_power(fmt.epsilon),
        "decimal digits": f"{fmt.decimal_digits:.1f}",
        "infinities": "yes" if fmt.infinities else "no",
        "NaNs": "yes" if fmt.nans else "no",
        "needs scaling": _scaling(fmt),
        "tensor cores since": fmt.since,
        "torch dtype": f"torch.{fmt.torch_dtype}" if fmt.torch_dtype else "none",
        "aliases": ", ".join(fmt.aliases),
    }


def _block_details(fmt: BlockFormat) -> dict[str, str]:
    of_tensor = " × tensor's scale" if fmt.tensor_scale else ""
    return {
        "": fmt.title,
        "name": fmt.name,
        "element": f"{fmt.element.name}, {fmt.element.bits} bits",
        "scale": _scale(fmt),
        "block size": f"{fmt.block_size} values",
        "bits per value": f"{fmt.bits_per_value:g}",
        "largest": f"{short_number(fmt.max)}{of_tensor}",
        "smallest": f"{short_number(fmt.smallest)}{of_tensor}",
        "range in a block": f"{short_number(fmt.element.max / fmt.element.smallest)} to 1",
        "needs scaling": "no: brings its own",
        "tensor cores since": fmt.since,
        "aliases": ", ".join(fmt.aliases) or "none",
    }


def _scaling(fmt: Format) -> str:
    """Return what must be scaled so that gradients do not underflow: narrower formats need finer scales."""
    if not fmt.needs_loss_scale:
        return "no"
    return "loss" if fmt.bits >= 16 else "tensor" if fmt.bits >= 8 else "block"


def _scale(fmt: BlockFormat) -> str:
    return f"{fmt.scale.name}{', fp32 per tensor' if fmt.tensor_scale else ''}"


def _draw(out: Console, formats: Sequence[Format]) -> None:
    from rich.text import Text

    table = terminal.table("format")
    legend = Text("  ").join(Text.assemble((letter, style), f" {part}") for letter, part, style in PARTS)
    table.add_column(Text.assemble(legend, "  bits"), no_wrap=True)
    for fmt in formats:
        drawn = layout(fmt, colour=out.color_system is not None)
        table.add_row(fmt.name, Text.assemble(drawn, f"  {fmt.bits}"))
    out.print(table)


def layout(fmt: Format, colour: bool) -> Text:
    """Draw the bits of a format with one letter per bit: coloured blocks, or groups of letters.

    >>> from ampwise.numbers.formats import find_format
    >>> str(layout(find_format("fp16"), colour=False))
    'S EEEEE MMMMMMMMMM'
    """
    from rich.text import Text

    counts = (int(fmt.signed), fmt.exponent_bits, fmt.mantissa_bits)
    drawn = [Text(letter * count, style) for (letter, _, style), count in zip(PARTS, counts, strict=True) if count]
    return Text("" if colour else " ").join(drawn)


def with_power(value: float) -> str:
    """Return a power of two as a decimal number and as a power.

    >>> with_power(2.0**-14), with_power(0.5)
    ('6.10e-05 = 2^-14', '0.5 = 2^-1')
    """
    return f"{short_number(value)} = 2^{math.frexp(value)[1] - 1}"
