"""Train a few steps in each precision, in turns, and say which is faster, by how much, and why not more.

MAKER names a function of yours that returns a model, a batch and what makes the loss of it:

  def make(batch=16):                       # in train.py; the parameter is optional
      model = Net()
      x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

A fourth thing that it returns is the optimizer. The whole step is measured: forward, backward, clip, optimizer. First
each precision has to give FP32's loss, within what rounding explains; one that does not is never called faster. Then
they take turns, FP32 twice: a difference no larger than that between the two is called noise. Below 1.1 times as fast
as FP32 the verdict is to stay, up to 1.5 it is optional, up to 2.5 use it, above definitely; and where it is low, the
reason is looked for in a profile.

Examples:
  ampwise compare train:make
  ampwise compare train.py:make --batch 64 --compile
  ampwise compare train:make --precisions fp32,bf16 --device cpu
  ampwise compare train:make --precisions fp16 --keep "fp32=*.head"
  ampwise compare train:make --html precisions.html
  ampwise compare train:make --json -q | jq '.rows[] | {label, ratio: .ratio.median}'

The exit code is 0 when it was measured, 1 when a precision computes something else than FP32, and 2 when there is
nothing to compare.

With --json, times are in seconds and memory in bytes, what is not known is null, a loss that is not finite is the
string "NaN", "Infinity" or "-Infinity", and a spread is {median, low, high}, with a tenth of the values below low and
a tenth above high:
  {subject, command, device, device_name, batch, tokens, rounds, noise, kept, flops, rows, layers, clocks, tf32_was_on,
   bf16_instructions, not_measured, verdict, best, findings, basis}
    one of the rows      {label, precision, compiled, problem, slower, loss: {loss, reference, tolerance,
                          finite_gradients, same}, step_s, ratio, ratio_to_eager, verdict, samples_per_s, tokens_per_s,
                          flops_per_s, peak_flops, peak_is_approximate, peak_share, ridge, intensity, memory: {peak,
                          parameters, gradients, optimizer, rest}, split: {seconds: {kind: number}, busy, launches,
                          on_device}, idle_share, products, skipped}
    one of the layers    {name, kind, times, seconds: {label: number}, certain, ratio: {label: number}}
ratio is to FP32 that is eager or compiled as the row is, ratio_to_eager to eager FP32; of a layer that is not certain,
as it is next to nothing of a step or the machine too noisy, it is null. command is the one that measures it again, and
basis says what each number rests on: measured here, derived, or a datasheet.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.printers import terminal

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
        help="of fp32, tf32, fp16, bf16 and fp8, with commas (default: those that the device runs)",
    )
    parser.add_argument("--compile", action="store_true", help="measure each with torch.compile, too")
    parser.add_argument("--batch", metavar="ROWS", type=int, help="how many rows the batch is to have")
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    parser.add_argument(
        "--optimizer", metavar="NAME", default="adamw", help="where MAKER returns none (default: adamw)"
    )
    parser.add_argument(
        "--clip", metavar="NORM", default="1.0", help=f"the norm that gradients are clipped to, or {NO_CLIP} (1.0)"
    )
    parser.add_argument(
        "--keep",
        metavar="fp32=PATTERN",
        action="append",
        default=[],
        help="modules that stay in FP32 where the others have 16 bits, by their names; may be repeated",
    )
    parser.add_argument("--rounds", metavar="N", type=int, help="how often each has its turn (default: as time allows)")
    parser.add_argument("--steps", metavar="N", type=int, help="timed steps of a turn (default: 0.1 s of them)")
    parser.add_argument("--html", metavar="FILE", help="write it as a page, too: one file that needs nothing else")
    parser.add_argument("-f", "--force", action="store_true", help="write over a file that is no earlier page")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say how far it is")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    paper = None if args.html is None else Path(args.html)
    if paper is not None:
        _check_paper(paper, args.force)  # before minutes are spent
    result = _compared(args)
    if paper is not None:
        _write_page(result, paper, args.force)
    _print(result, as_json=args.json)
    if paper is not None and not args.json:
        terminal.say("\nThe page is {}", paper, stream=sys.stdout)
    return 1 if any(row.differs for row in result.rows) else 0


def _compared(args: argparse.Namespace) -> PrecisionComparison:
    _need_torch()
    from ampwise.tune.compare.comparing import compare
    from ampwise.tune.compare.contender import kept_patterns
    from ampwise.tune.compare.progress import progress_on

    clip_norm, kept = _clip_norm(args.clip), kept_patterns(args.keep)
    precisions = None if args.precisions is None else [name.strip() for name in args.precisions.split(",")]
    # What the user's code prints is not what was asked for.
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
        raise BadInput(f"--clip {text}: a norm above zero is expected, or {NO_CLIP}.")
    return norm


def _print(result: PrecisionComparison, *, as_json: bool) -> None:
    if as_json:
        from ampwise.strict_json import dumps

        terminal.write(dumps(result.as_dict()), sys.stdout)
        return
    from ampwise.tune.compare.text import show

    terminal.print_tables(lambda out: show(out, result))


def _check_paper(paper: Path, force: bool) -> None:
    from ampwise.report.page.writing import check_paper

    check_paper(paper, "--html", force=force)


def _write_page(result: PrecisionComparison, paper: Path, force: bool) -> None:
    from ampwise.report.page.precisions import precisions_page
    from ampwise.report.page.writing import write_page

    write_page(lambda: precisions_page(result.speeds, result.findings), paper, "--html", force=force)
