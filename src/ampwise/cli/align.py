"""Find the matmuls of a training step whose sizes waste time, and say what to do about each.

Tensor cores load words of 16 bytes, so the contiguous sizes of a matrix should be multiples of 8 for 16-bit elements
and of 4 for 32-bit ones; for FP8 they must be multiples of 16. The training step runs once, forward and backward. On a
GPU, the time that better sizes would save is measured; elsewhere the step runs on meta tensors, and costs are derived
from the FLOPs of each matmul. `ampwise.pad_(model)` fixes what padding can fix.

MAKE names a function that returns model, batch and loss function:
  def make(batch=16):
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

Examples:
  ampwise align train:make
  ampwise align train.py:make --precision fp8 --gpu h100-sxm
  ampwise align train:make --batch 32 --to 64
  ampwise align train:make --json | jq '.layers[] | select(.worth_fixing) | .name'

The exit code is 1 if something is worth fixing, 0 if not, and 2 on an error.

With --json, {subject, precision, device, gpu, processors, to, rows, tokens, matrix_flops, step_ms, basis, layers,
padding, remarks, findings}; unknown values are null:
  one of the layers   {name, modules, kind, precision, product: {m, n, k, batches}, off: [{role, size, better}],
                       share, off_share, saved_ms, worth_fixing, advice}
  padding             what ampwise.pad_ would do: {padded: [{names, before, after, how, added}],
                       left: [{name, size, why}]}
  findings            [{code, name, severity, message, place, evidence, fix}]
Shares are of the matmul FLOPs. saved_ms is the time saved per step, null if it was not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from ampwise.cli import print_json
from ampwise.finding import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from ampwise.tune.align.result import Alignment

__all__ = ["add_arguments", "run"]

NEEDS_TORCH = True
WRAPPED = 2  # the column with the misaligned sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("make", metavar="MAKE", help="module:function or file.py:function, such as train:make")
    add("--precision", metavar="NAME", default="bf16", help="fp32, tf32, fp16, bf16 (default) or fp8")
    add("--gpu", metavar="NAME", help="the GPU to judge for, from `ampwise gpu --list` (default: this one)")
    add("--device", metavar="NAME", help="where to run the step: cuda or cpu (default: cuda if there)")
    add("--batch", metavar="N", type=int, help="rows of the batch (default: as the function makes it)")
    add("--to", metavar="N", type=int, help="sizes should be multiples of this, such as 64")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    add("--json", action="store_true", help="JSON, as described above")


def run(args: argparse.Namespace) -> int:
    from ampwise.tune.align.align import align

    def progress(text: str) -> None:
        if not args.quiet:
            terminal.say("ampwise: {}", text)

    with contextlib.redirect_stdout(sys.stderr):  # keep what the user's code prints out of our output
        found = align(
            args.make,
            precision=args.precision,
            gpu=args.gpu,
            batch=args.batch,
            to=args.to,
            device=args.device,
            progress=progress,
        )
    if args.json:
        print_json(found.as_dict())
    else:
        terminal.print_tables(lambda out: _show(out, found))
    return 1 if found.findings else 0


def _show(out: Console, found: Alignment) -> None:
    from ampwise.tune.align.result import HEADINGS

    def say(text: str) -> None:  # without wrapping it, so that it can be searched for
        out.print(terminal.printable(text), markup=False, highlight=False, soft_wrap=True)

    say(found.head_line)
    if found.off:
        table = terminal.table(*HEADINGS)
        table.columns[WRAPPED].no_wrap = False  # nothing is cut off on a narrow terminal
        for row in found.rows():
            table.add_row(*row)
        out.print()
        out.print(table)
        out.print()
    for line in (*found.to_do(), *(f"remark: {remark}" for remark in found.remarks), found.verdict):
        say(line)
