"""Find matmuls whose sizes slow down tensor cores.

Tensor cores load words of 16 bytes, so the contiguous sizes of a matrix should be multiples of 8 for 16-bit elements
and of 4 for 32-bit ones; for FP8 they must be multiples of 16. The training step runs once, forward and backward. On a
GPU, the time that better sizes would save is measured; elsewhere the step runs on meta tensors, and costs are derived
from the FLOPs of each matmul. `ampwise.pad_(model)` fixes what padding can fix.

MAKE is your function that makes the model and a batch, train.py:make; `ampwise init train.py` writes one.

Examples:
  ampwise align train.py:make
  ampwise align train.py:make --precision fp8 --gpu h100-sxm
  ampwise align train.py:make --batch 32 --to 64
  ampwise align train.py:make --json | jq '.layers[]|select(.worth_fixing).name'

The exit code is 1 if something is worth fixing, 0 if not, and 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.cli import print_json
from ampwise.cli._arguments import add_make, count
from ampwise.finding import terminal
from ampwise.report.result_view import print_result

GROUP = "Choose a precision"
NEEDS_TORCH = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser)
    add("--precision", metavar="NAME", default="bf16", help="fp32, tf32, fp16, bf16 (default) or fp8")
    add("--gpu", metavar="NAME", help="the GPU to judge for, from `ampwise gpu --list` (default: this one)")
    add("--device", metavar="NAME", help="where to run the step: cuda or cpu (default: cuda if there)")
    add("--batch", metavar="N", type=count, help="rows of the batch (default: as the function makes it)")
    add("--to", metavar="N", type=count, help="sizes should be multiples of this, such as 64")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    add("--json", action="store_true", help="JSON, as `ampwise schema align` describes it")


def run(args: argparse.Namespace) -> int:
    from ampwise.tune.align.matmuls import multiple_for

    multiple_for(args.precision, args.to)  # raises before torch is imported
    from ampwise.tune.align.align import align

    # Keep what the user's code prints out of our output.
    showing = terminal.progress_line("making the model", "{}", prefix="ampwise: ", quiet=args.quiet)
    with showing as progress, contextlib.redirect_stdout(sys.stderr):
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
        print_result(found)
    return 1 if found.findings else 0
