"""Time training steps in each precision: which is faster, by how much, and why not more.

MAKER names a function of yours that returns a model, a batch and a loss function:

  def make(batch=16):                       # in train.py; the parameter is optional
      model = Net()
      x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

It may return the optimizer as a fourth value. The whole step is measured: forward, backward, clip, optimizer. First,
each precision must give FP32's loss, within rounding; one that does not is never called faster. Then the precisions
take turns, FP32 twice: a difference no larger than the one between the two FP32 runs is noise. Below a speedup of 1.1x
over FP32 the verdict is to stay, up to 1.5x it is optional, up to 2.5x use it, above definitely. If the speedup is low,
a profile shows why.

Examples:
  ampwise bench train:make
  ampwise bench train.py:make --batch 64 --compile
  ampwise bench train:make --precisions fp32,bf16 --device cpu
  ampwise bench train:make --precisions fp16 --keep "fp32=*.head"
  ampwise bench train:make --html precisions.html
  ampwise bench train:make --json -q | jq '.rows[] | {label, ratio: .ratio.median}'

The exit code is 0 if all precisions were measured, 1 if one of them gives another loss than FP32, and 2 on an error.

With --json, times are in seconds, memory is in bytes and unknown values are null. A loss that is not finite is the
string "NaN", "Infinity" or "-Infinity". A spread is {median, low, high}, the 50th, 10th and 90th percentiles:
  {subject, command, device, device_name, batch, tokens, rounds, noise, kept, flops, rows, layers, clocks, tf32_was_on,
   bf16_instructions, not_measured, verdict, best, findings, basis}
    one of the rows      {label, precision, compiled, problem, slower, loss: {loss, reference, tolerance,
                          finite_gradients, same}, step_s, ratio, ratio_to_eager, verdict, samples_per_s, tokens_per_s,
                          flops_per_s, peak_flops, peak_is_approximate, peak_share, ridge, intensity, memory: {peak,
                          parameters, gradients, optimizer, rest}, split: {seconds: {kind: number}, busy, launches,
                          on_device}, idle_share, products, skipped}
    one of the layers    {name, kind, times, seconds: {label: number}, certain, ratio: {label: number}}
ratio compares with FP32 that is compiled if the row is, ratio_to_eager with eager FP32. A layer's ratio is null if it
is not certain, because the layer is too small a part of the step or the machine is too noisy. command repeats the
measurement, and basis says where each number comes from: measured here, derived, or a datasheet.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ampwise.cli import print_json
from ampwise.errors import BadInput
from ampwise.finding import terminal

__all__ = ["add_arguments", "run"]

NEEDS_TORCH = True
NO_CLIP = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("maker", metavar="MAKER", help="module:function or file.py:function, such as train:make")
    add(
        "--precisions",
        metavar="LIST",
        help="comma-separated: fp32, tf32, fp16, bf16, fp8 (default: those that the device runs)",
    )
    add("--compile", action="store_true", help="also measure each with torch.compile")
    add("--batch", metavar="ROWS", type=int, help="rows in the batch")
    add("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    add("--optimizer", metavar="NAME", default="adamw", help="used if MAKER returns none (default: adamw)")
    add("--clip", metavar="NORM", default="1.0", help=f"clip gradients to this norm, or {NO_CLIP} (default: 1.0)")
    add(
        "--keep",
        metavar="fp32=PATTERN",
        action="append",
        default=[],
        help="keep modules whose names match in FP32; may be repeated",
    )
    add("--rounds", metavar="N", type=int, help="turns of each precision (default: as time allows)")
    add("--steps", metavar="N", type=int, help="timed steps in a turn (default: as many as take 0.1 s)")
    add("--html", metavar="FILE", help="also write the result as a self-contained HTML page")
    add("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    add("--json", action="store_true", help="JSON, as described above")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from ampwise.report.page.page_file import check_page_path, write_page

    page_path = None if args.html is None else Path(args.html)
    try:
        clip_norm = None if args.clip == NO_CLIP else float(args.clip)
    except ValueError:
        clip_norm = -1.0
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise BadInput(f"--clip {args.clip}: expected a norm above zero, or {NO_CLIP}.")
    if page_path is not None:
        check_page_path(page_path, "--html", force=args.force)  # before minutes are spent
    from ampwise.tune.bench.bench import bench, progress_on
    from ampwise.tune.bench.lineup import parse_keep
    from ampwise.tune.bench.page import precisions_page
    from ampwise.tune.bench.result import show

    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        result = bench(
            args.maker,
            None if args.precisions is None else [name.strip() for name in args.precisions.split(",")],
            compiled=args.compile,
            batch=args.batch,
            device=args.device,
            optimizer=args.optimizer,
            clip_norm=clip_norm,
            keep_fp32=parse_keep(args.keep),
            rounds=args.rounds,
            steps=args.steps,
            progress=progress,
        )
    if page_path is not None:
        write_page(lambda: precisions_page(result.speeds, result.findings), page_path, "--html", force=args.force)
    if args.json:
        print_json(result.as_dict())
    else:
        terminal.print_tables(lambda out: show(out, result))
        if page_path is not None:
            terminal.say("\nWrote {}", page_path, stream=sys.stdout)
    return 1 if any(row.differs for row in result.rows) else 0
