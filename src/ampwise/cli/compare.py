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
  ampwise compare train:make
  ampwise compare train.py:make --batch 64 --compile
  ampwise compare train:make --precisions fp32,bf16 --device cpu
  ampwise compare train:make --precisions fp16 --keep "fp32=*.head"
  ampwise compare train:make --html precisions.html
  ampwise compare train:make --json -q | jq '.rows[] | {label, ratio: .ratio.median}'

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

from ampwise.finding import terminal

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from pathlib import Path

    from ampwise.tune.compare.result import PrecisionComparison

__all__ = ["add_arguments", "run"]

NO_CLIP = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("maker", metavar="MAKER", help="module:function or file.py:function, such as train:make")
    parser.add_argument(
        "--precisions",
        metavar="LIST",
        help="comma-separated: fp32, tf32, fp16, bf16, fp8 (default: those that the device runs)",
    )
    parser.add_argument("--compile", action="store_true", help="also measure each with torch.compile")
    parser.add_argument("--batch", metavar="ROWS", type=int, help="rows in the batch")
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    parser.add_argument(
        "--optimizer", metavar="NAME", default="adamw", help="used if MAKER returns none (default: adamw)"
    )
    parser.add_argument(
        "--clip", metavar="NORM", default="1.0", help=f"clip gradients to this norm, or {NO_CLIP} (default: 1.0)"
    )
    parser.add_argument(
        "--keep",
        metavar="fp32=PATTERN",
        action="append",
        default=[],
        help="keep modules whose names match in FP32; may be repeated",
    )
    parser.add_argument("--rounds", metavar="N", type=int, help="turns of each precision (default: as time allows)")
    parser.add_argument("--steps", metavar="N", type=int, help="timed steps in a turn (default: as many as take 0.1 s)")
    parser.add_argument("--html", metavar="FILE", help="also write the result as a self-contained HTML page")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    page_path = None if args.html is None else Path(args.html)
    if page_path is not None:
        _check_page_path(page_path, args.force)  # before minutes are spent
    result = _compared(args)
    if page_path is not None:
        _write_page(result, page_path, args.force)
    _print(result, as_json=args.json)
    if page_path is not None and not args.json:
        terminal.say("\nWrote {}", page_path, stream=sys.stdout)
    return 1 if any(row.differs for row in result.rows) else 0


def _compared(args: argparse.Namespace) -> PrecisionComparison:
    _need_torch()
    from ampwise.tune.compare.compare import compare
    from ampwise.tune.compare.contender import parse_keep
    from ampwise.tune.compare.progress import progress_on

    clip_norm, kept = _clip_norm(args.clip), parse_keep(args.keep)
    precisions = None if args.precisions is None else [name.strip() for name in args.precisions.split(",")]
    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        return compare(
            args.maker,
            precisions,
            compiled=args.compile,
            batch=args.batch,
            device=args.device,
            optimizer=args.optimizer,
            clip_norm=clip_norm,
            keep_fp32=kept,
            rounds=args.rounds,
            steps=args.steps,
            progress=progress,
        )


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise compare needs torch: pip install 'ampwise[torch]'") from error


def _clip_norm(text: str) -> float | None:
    from ampwise.errors import BadInput

    if text == NO_CLIP:
        return None
    try:
        norm = float(text)
    except ValueError:
        norm = -1.0
    if not 0 < norm < float("inf"):
        raise BadInput(f"--clip {text}: expected a norm above zero, or {NO_CLIP}.")
    return norm


def _print(result: PrecisionComparison, *, as_json: bool) -> None:
    if as_json:
        from ampwise.finding.strict_json import dumps

        terminal.write(dumps(result.as_dict()), sys.stdout)
        return
    from ampwise.tune.compare.text import show

    terminal.print_tables(lambda out: show(out, result))


def _check_page_path(page_path: Path, force: bool) -> None:
    from ampwise.report.page.page_file import check_page_path

    check_page_path(page_path, "--html", force=force)


def _write_page(result: PrecisionComparison, page_path: Path, force: bool) -> None:
    from ampwise.report.page.page_file import write_page
    from ampwise.tune.compare.page import precisions_page

    write_page(lambda: precisions_page(result.speeds, result.findings), page_path, "--html", force=force)
