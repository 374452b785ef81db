"""Time training steps in each precision, and say why not faster.

MAKE is your function that makes the model, a batch and the loss function; `ampwise init train.py` writes one:

  def make(batch=16):  # in train.py; the parameter is optional
      model = Net()
      x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

It may return the optimizer as a fourth value. The whole step is measured: forward, backward, clip, optimizer. First,
each precision must give FP32's loss, within rounding; one that does not is never called faster. Then the precisions
take turns, FP32 twice: a difference no larger than the one between the two FP32 runs is noise. Below a speedup of 1.1x
over FP32 the verdict is to stay, up to 1.5x it is optional, up to 2.5x use it, above definitely. If the speedup is low,
a profile shows why.

Examples:
  ampwise bench train.py:make
  ampwise bench train.py:make --batch 64 --compile
  ampwise bench train.py:make --precisions fp32,bf16 --device cpu
  ampwise bench train.py:make --precisions fp16 --keep "fp32=*.head"
  ampwise bench train.py:make -o precisions.html
  ampwise bench train.py:make --json -q | jq '.rows[] | [.label, .ratio.median]'
  ampwise bench --equal-loss train.py:make --precisions bf16,fp8 --budget 600

With --equal-loss each precision is trained, from the same weights on the same batches, with several seeds, and
compared with the first one by the time it takes to the same held-back loss: a faster step that needs more steps may
gain nothing. For new data in every step, MAKE returns a DataLoader as its batch, or two: the second is held back.

The exit code is 0 if all precisions were measured, 1 if one of them gives another loss than FP32, and 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from ampwise.cli import print_json
from ampwise.cli._arguments import add_make, check_precision, count
from ampwise.errors import BadInput, UnknownName
from ampwise.finding import terminal
from ampwise.report.result_view import print_result
from ampwise.train.precision.names import PLAIN

GROUP = "Choose a precision"
NEEDS_TORCH = True
NO_CLIP = "none"
PRECISIONS = (*PLAIN, "fp8")
FP8_MEASURED = "fp8-measured"
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser)
    add(
        "--precisions",
        metavar="LIST",
        help=f"comma-separated: {', '.join(PRECISIONS)} (default: those that the device runs)",
    )
    add("--compile", action="store_true", help="also measure each with torch.compile")
    add("--batch", metavar="ROWS", type=count, help="rows in the batch")
    add("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    add(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        help=f"used if MAKE returns none: {', '.join(OPTIMIZERS)} (default: adamw)",
    )
    add("--clip", metavar="NORM", default="1.0", help=f"clip gradients to this norm, or {NO_CLIP} (default: 1.0)")
    add(
        "--keep",
        metavar="fp32=PATTERN",
        action="append",
        default=[],
        help="keep modules whose names match in FP32; may be repeated",
    )
    add("--rounds", metavar="N", type=count, help="turns of each precision (default: as time allows)")
    add("--steps", metavar="N", type=count, help="timed steps in a turn (default: as many as take 0.1 s)")
    add("--equal-loss", action="store_true", help="train, and compare the time to the same held-back loss")
    add("--budget", metavar="SECONDS", type=count, default=300, help="training time for --equal-loss (default: 300)")
    add("--seeds", metavar="N", type=count, default=3, help="runs of each precision for --equal-loss (default: 3)")
    add("-o", "--output", metavar="FILE", help="also write the result as an HTML page")
    add("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    add("--json", action="store_true", help="JSON, as `ampwise schema bench` describes it")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from ampwise.report.page.page_file import check_page_path, write_page

    page_path = None if args.output is None else Path(args.output)
    try:
        clip_norm = None if args.clip == NO_CLIP else float(args.clip)
    except ValueError:
        clip_norm = -1.0
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise BadInput(f"--clip {args.clip}: expected a norm above zero, or {NO_CLIP}.")
    if page_path is not None:
        check_page_path(page_path, force=args.force)  # before minutes are spent
    names = None if args.precisions is None else [name.strip() for name in args.precisions.split(",")]
    for name in names or ():
        check_precision("--precisions", name, (*PRECISIONS, FP8_MEASURED) if args.equal_loss else PRECISIONS)
    if args.optimizer not in OPTIMIZERS:
        listing = f"--optimizer takes {', '.join(OPTIMIZERS)}."
        raise UnknownName("optimizer", args.optimizer, OPTIMIZERS, listing=listing)
    for text in args.keep:
        if not text.startswith("fp32=") or text == "fp32=":
            raise BadInput(f"--keep {text}: expected fp32=PATTERN, such as fp32=*.router.")
    how = {
        "compiled": args.compile,
        "batch": args.batch,
        "device": args.device,
        "optimizer": args.optimizer,
        "clip_norm": clip_norm,
        "keep_fp32": tuple(text.removeprefix("fp32=") for text in args.keep),
    }
    if args.equal_loss:
        return _equal_loss(args, names, how)
    from ampwise.tune.bench.bench import bench, progress_on
    from ampwise.tune.bench.page import precisions_page

    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        result = bench(
            args.make,
            names,
            rounds=args.rounds,
            steps=args.steps,
            progress=progress,
            **how,
        )
    if page_path is not None:
        write_page(lambda: precisions_page(result.speeds, result.findings), page_path, force=args.force)
    if args.json:
        print_json(result.as_dict())
    else:
        print_result(result)
        if page_path is not None:
            terminal.say("\nWrote {}", page_path, stream=sys.stdout)
    return 1 if any(row.differs for row in result.rows) else 0


def _equal_loss(args: argparse.Namespace, names: list[str] | None, how: dict[str, Any]) -> int:
    given = {"-o": args.output, "--rounds": args.rounds, "--steps": args.steps}
    for option, value in given.items():
        if value is not None:
            raise BadInput(f"{option} does not go with --equal-loss, which takes --budget and --seeds.")
    if args.seeds < 2:
        raise BadInput(f"--seeds {args.seeds}: expected at least 2, or nothing would say what is chance.")
    from ampwise.tune.bench.bench import progress_on
    from ampwise.tune.bench.equal_loss import equal_loss

    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        result = equal_loss(
            args.make,
            names,
            budget_s=args.budget,
            seeds=args.seeds,
            progress=progress,
            **how,
        )
    if args.json:
        print_json(result.as_dict())
    else:
        print_result(result)
    return 0
