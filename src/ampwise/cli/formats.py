"""Compare number formats: range, precision, bits, and what they mean for training.

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

With --json: an array with one object per format. What a format does not have is null. Magnitudes at or below
2**flush_exponent round to zero. Magnitudes above overflow_threshold overflow, and so does one equal to it if
overflow_at_threshold is true.
  kind "scalar"  {name, title, aliases, torch_dtype, bits, bytes_per_value, signed, exponent_bits,
                  mantissa_bits, bias, codes, infinities, nans, max, smallest_normal, smallest_subnormal,
                  epsilon, decimal_digits, flush_exponent, overflow_threshold, overflow_at_threshold,
                  needs_loss_scale, since, training}
  kind "block"   {name, title, aliases, element, scale, block_size, tensor_scale, bits_per_value,
                  bytes_per_value, max, smallest, needs_loss_scale, since, training}
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampwise.finding import terminal
from ampwise.numbers.formats.format import short_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampwise.numbers.formats import BlockFormat, Format

__all__ = ["add_arguments", "run"]

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
    parser.add_argument("--json", action="store_true", help="JSON, as described above")


def run(args: argparse.Namespace) -> int:
    from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, BlockFormat, find_format

    named = [find_format(name) for name in args.names] or [*FORMATS.values(), *BLOCK_FORMATS.values()]
    chosen = list({fmt.name: fmt for fmt in named}.values())  # "half" and "fp16" are one
    if args.json:
        from ampwise.finding.strict_json import dumps

        terminal.write(dumps([fmt.as_dict() for fmt in chosen]), sys.stdout)
        return 0
    scalars = [fmt for fmt in chosen if not isinstance(fmt, BlockFormat)]
    blocks = [fmt for fmt in chosen if isinstance(fmt, BlockFormat)]
    show = _show_details if args.names else _show_overview
    terminal.print_tables(lambda out: show(out, scalars, blocks))
    return 0


# All formats: a drawing, a table of numbers, a table of block formats.


def _show_overview(out: Console, scalars: Sequence[Format], blocks: Sequence[BlockFormat]) -> None:
    out.print(_drawing(scalars, _in_colour(out)))
    wide = out.width >= WIDTH_FOR_HARDWARE
    numbers = [_numbers(scalars, with_hardware=True)] if wide else [_numbers(scalars), _hardware(scalars)]
    for table in (*numbers, _blocks(blocks)):
        out.print()
        out.print(table)
    out.print()
    for line in NOTES:
        out.print(line, style="dim")


def _numbers(formats: Sequence[Format], *, with_hardware: bool = False) -> Table:
    table = terminal.table("format")
    for heading in ("largest", "smallest\nnormal", "smallest\nsubnormal", "epsilon", "decimal\ndigits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("needs\nscaling", no_wrap=True)
    if with_hardware:
        table.add_column("tensor cores since", no_wrap=True)
    for fmt in formats:
        figures = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon)
        cells = [fmt.name, *map(short_number, figures), f"{fmt.decimal_digits:.1f}", _scaling(fmt)]
        table.add_row(*cells, *([fmt.since] if with_hardware else []))
    return table


def _hardware(formats: Sequence[Format]) -> Table:
    table = terminal.table("format", "tensor cores since")
    for fmt in formats:
        table.add_row(fmt.name, fmt.since)
    return table


def _blocks(formats: Sequence[BlockFormat]) -> Table:
    table = terminal.table("block format", "element", "scale")
    table.add_column("block\nsize", justify="right", no_wrap=True)
    table.add_column("bits per\nvalue", justify="right", no_wrap=True)
    table.add_column("tensor cores since")
    for fmt in formats:
        bits = f"{fmt.bits_per_value:g}"
        table.add_row(fmt.name, fmt.element.name, _scale(fmt), str(fmt.block_size), bits, fmt.since)
    return table


def _scale(fmt: BlockFormat) -> str:
    return f"{fmt.scale.name}{', fp32 per tensor' if fmt.tensor_scale else ''}"


# Named formats: a drawing, then one column per format, as many side by side as fit the terminal.


def _show_details(out: Console, scalars: Sequence[Format], blocks: Sequence[BlockFormat]) -> None:
    from rich.text import Text

    drawn = dict.fromkeys([*scalars, *(part for fmt in blocks for part in (fmt.element, fmt.scale))])
    out.print(_drawing(list(drawn), _in_colour(out)))
    details = [_scalar_details(fmt) for fmt in scalars], [_block_details(fmt) for fmt in blocks]
    for columns in details:
        for group in _column_groups(columns, out.width):
            out.print()
            out.print(_side_by_side(group))
    out.print()
    meanings = [(fmt.title, fmt.training) for fmt in scalars] + [(fmt.title, fmt.training) for fmt in blocks]
    for title, training in meanings:
        out.print(Text.assemble((f"{title}: ", "bold"), training))


def _scalar_details(fmt: Format) -> dict[str, str]:
    subnormal = fmt.smallest_subnormal
    return {
        "": fmt.title,
        "name": fmt.name,
        "bits": f"{fmt.bits}{f', stored in {fmt.storage_bits}' if fmt.storage_bits else ''}",
        "codes": f"{fmt.codes:,}" if fmt.bits <= 32 else f"2^{fmt.bits}",
        "bias": str(fmt.bias),
        "largest": short_number(fmt.max),
        "smallest normal": with_power(fmt.smallest_normal),
        "smallest subnormal": "none" if subnormal is None else with_power(subnormal),
        "zero at or below": _flushes(fmt),
        "overflows": _overflows(fmt),
        "epsilon": with_power(fmt.epsilon),
        "decimal digits": f"{fmt.decimal_digits:.1f}",
        "infinities": "yes" if fmt.infinities else "no",
        "NaNs": "yes" if fmt.nans else "no",
        "needs scaling": _scaling(fmt),
        "tensor cores since": fmt.since,
        "torch dtype": f"torch.{fmt.torch_dtype}" if fmt.torch_dtype else "none",
        "aliases": ", ".join(fmt.aliases),
    }


def _flushes(fmt: Format) -> str:
    if fmt.flush_exponent is None:
        return "never: it has no zero"
    threshold = math.ldexp(1.0, fmt.flush_exponent)
    return with_power(threshold) if threshold else f"2^{fmt.flush_exponent}"  # FP64's is too small for a float


def _overflows(fmt: Format) -> str:
    if not (fmt.infinities or fmt.nans):
        return f"never: stays at {short_number(fmt.max)}"
    becomes = "infinity" if fmt.infinities else "NaN"
    threshold = short_number(fmt.overflow_threshold)
    if math.isinf(fmt.overflow_threshold) or threshold == short_number(fmt.max):
        return f"past the largest: {becomes}"
    return f"{'from' if fmt.overflow_at_threshold else 'above'} {threshold}: {becomes}"


def _scaling(fmt: Format) -> str:
    """Return what must be scaled so that gradients do not underflow: narrower formats need finer scales."""
    if not fmt.needs_loss_scale:
        return "no"
    return "loss" if fmt.bits >= 16 else "tensor" if fmt.bits >= 8 else "block"


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


def _column_groups(columns: Sequence[dict[str, str]], width: int) -> Iterator[Sequence[dict[str, str]]]:
    """Yield groups of columns that fit ``width`` together; a single column may be wider."""
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and _width(columns[start : end + 1]) <= width:
            end += 1
        yield columns[start:end]
        start = end


def _width(columns: Sequence[dict[str, str]]) -> int:
    labels = max(map(len, columns[0]))
    return labels + sum(GAP + min(WIDEST_COLUMN, max(map(len, facts.values()))) for facts in columns)


def _side_by_side(columns: Sequence[dict[str, str]]) -> Table:
    table = terminal.table("")
    table.show_header = False
    table.columns[0].style = "dim"
    for _ in columns:
        table.add_column(max_width=WIDEST_COLUMN)
    for label in columns[0]:
        table.add_row(label, *(facts[label] for facts in columns), style="" if label else "bold")
    return table


# Bits, drawn.


def _drawing(formats: Sequence[Format], colour: bool) -> Table:
    from rich.text import Text

    table = terminal.table("format")
    legend = Text("  ").join(Text.assemble((letter, style), f" {part}") for letter, part, style in PARTS)
    table.add_column(Text.assemble(legend, "  bits"), no_wrap=True)
    for fmt in formats:
        table.add_row(fmt.name, Text.assemble(layout(fmt, colour), f"  {fmt.bits}"))
    return table


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


def _in_colour(out: Console) -> bool:
    return out.color_system is not None


# Numbers as text.


def with_power(value: float) -> str:
    """Return a power of two as a decimal number and as a power.

    >>> with_power(2.0**-14), with_power(0.5)
    ('6.10e-05 = 2^-14', '0.5 = 2^-1')
    """
    return f"{short_number(value)} = 2^{math.frexp(value)[1] - 1}"
