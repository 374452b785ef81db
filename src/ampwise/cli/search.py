"""Find the cheapest format for each module that keeps loss and gradients close to FP32.

FUNCTION makes a model, a batch and a loss function. It is called once per batch, each time with another seed; the model
of the first call is searched:

  def make():                                    # in train.py
      model = Net()
      x, y = torch.randn(16, 128), torch.randint(10, (16,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

Formats of 8 bits and fewer are emulated, so a CPU can tell whether a model could train in FP8 or MXFP8. The error is
the larger of two: the relative difference of the loss, and half of the squared relative error of the gradient, in the
module where it is largest; the latter is the part of a step's progress that is lost. FP32 is compared with itself
first: a tolerance below its own noise is refused. A quarter of the batches is held back to verify the result.

Examples:
  ampwise search train:make
  ampwise search train:make --formats mxfp8,bf16,fp32 --tolerance 0.02 --gpu b200
  ampwise search train:make --modules 'blocks.*' --out policy.json
  ampwise search train:make --out policy.json --resume

Trials are kept in OUT.part (without --out, in ampwise-search.part) until the search ends: after Ctrl-C, --resume
continues from them, and -f starts over. ampwise.SearchResult.load("policy.json") reads a policy file.

The exit code is 0 if some module can be narrower than FP32, 1 if none was found, 2 on an error, and 130 after Ctrl-C.

With --json, unknown values are null, and an infinite error is "Infinity":
  {what, version, subject, formats, tolerance, noise, error, loss_error, gradient_error, worst,
   modules: {name: format}, policy: {version, base, keep: [{pattern, precision}]}, narrow: {pattern: format}, widened,
   ranking: [{name, kind, format, share, narrower, estimates: {format: error}, alone, reasons}],
   gain: {cost, gpu, faster_than_fp32, faster_than_16_bits, why_no_time, kept_bytes, kept_bytes_fp32},
   gap, verified: {batches, error, worst, raised, error_after}, batches, trials, passes, spent, seconds, device, notes}
The ranking goes from the most to the least sensitive module. "" is the name of the model itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from ampwise.finding.terminal import print_tables, say, write

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    import torch

    from ampwise.tune.search.result import SearchResult
    from ampwise.tune.train_case import TrainCase

__all__ = ["add_arguments", "run"]

INTERRUPTED = 130
PART = "ampwise-search.part"
DEFAULTS = {"formats": "e4m3,bf16,fp32", "tolerance": 0.01, "batches": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function, such as train:make")
    parser.add_argument(
        "--formats",
        metavar="NAMES",
        default=DEFAULTS["formats"],
        help="comma-separated formats to choose from, including fp32 (default: %(default)s; `ampwise formats` lists "
        "all; mxfp8+up rounds scales up)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="NUMBER",
        type=float,
        default=DEFAULTS["tolerance"],
        help="largest error against FP32 (default: %(default)s)",
    )
    parser.add_argument(
        "--batches",
        metavar="COUNT",
        type=int,
        default=DEFAULTS["batches"],
        help="batches to use, at most 16; a quarter is held back (default: %(default)s)",
    )
    parser.add_argument(
        "--modules", metavar="GLOB", action="append", default=[], help="search only these modules; may be repeated"
    )
    parser.add_argument(
        "--trials",
        metavar="COUNT",
        type=int,
        help="try at most this many assignments, and as many again if one fails on the batches held back",
    )
    parser.add_argument("--gpu", metavar="NAME", help="predict the time on this GPU, from `ampwise gpu --list`")
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    parser.add_argument("--out", metavar="FILE", help="write the result there, as JSON")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite existing files")
    parser.add_argument("--resume", action="store_true", help="continue from the trials of an interrupted search")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    part = Path(f"{args.out}.part" if args.out else PART)
    _check(args)
    _check_files(args, part)
    if not args.resume:
        part.unlink(missing_ok=True)
    try:
        found = _found(args, part)
    except KeyboardInterrupt:
        say("\nampwise: interrupted; resume with: {}", _command(args))
        return INTERRUPTED
    _print(found, args)
    if args.out:  # after printing, so that the result is not lost if the file cannot be written
        found.save(args.out)
        if not args.json:
            say("Wrote {}; load it with ampwise.SearchResult.load({})", args.out, repr(args.out), stream=sys.stdout)
    return 0 if found.narrower else 1


def _check(args: argparse.Namespace) -> None:
    from ampwise.errors import BadInput, MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise search needs torch: pip install 'ampwise[torch]'") from error
    from ampwise.tune.search.arguments import MOST_BATCHES

    if not 1 <= args.batches <= MOST_BATCHES:
        raise BadInput(
            f"search --batches {args.batches}: expected 1 to {MOST_BATCHES}; of every four, one is held back."
        )


def _check_files(args: argparse.Namespace, part: Path) -> None:
    """Check before the search that files can be written, and refuse to overwrite files without -f."""
    from ampwise.errors import BadInput

    if args.out and (Path(args.out).is_dir() or not os.access(Path(args.out).parent, os.W_OK)):
        raise BadInput(f"search --out {args.out}: cannot write there. Name a file in an existing, writable folder.")
    if args.out and Path(args.out).exists() and not args.force:
        raise BadInput(f"search --out {args.out}: the file exists. Name another one, or overwrite it with -f.")
    if part.exists() and not (args.resume or args.force):
        raise BadInput(
            f"search: {part} has the trials of an interrupted search. Continue with --resume, or start over with -f."
        )


def _found(args: argparse.Namespace, part: Path) -> SearchResult:
    from ampwise.trace.capsule.capsule_replay import device_named
    from ampwise.tune.search.progress import progress_on
    from ampwise.tune.search.search import search

    formats = [name.strip() for name in args.formats.split(",") if name.strip()]
    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        subject, batches = _made(args.function, args.batches, device_named(args.device, "cuda"))
        return search(
            subject.loss_fn,
            batches,
            tolerance=args.tolerance,
            formats=formats,
            model=subject.model,
            modules=args.modules,
            gpu=args.gpu,
            trials=args.trials,
            resume=part,
            progress=progress,
            name=args.function,
        )


def _made(name: str, count: int, device: torch.device) -> tuple[TrainCase, list[Any]]:
    """Return what the first call makes, and the batches of all calls."""
    import torch

    from ampwise.tune.train_case import load_factory

    maker = load_factory(name)
    torch.manual_seed(0)
    subject = maker.make(device)
    batches: list[Any] = [dict(subject.kwargs) or subject.args]
    for seed in range(1, count):
        torch.manual_seed(seed)
        other = maker.make(device)
        batches.append(dict(other.kwargs) or other.args)
    return subject, batches


def _print(found: SearchResult, args: argparse.Namespace) -> None:
    from ampwise.finding.strict_json import dumps
    from ampwise.tune.search.text import show

    if args.json:
        write(dumps(found.as_dict()), sys.stdout)
        return
    print_tables(lambda out: show(out, found))


def _command(args: argparse.Namespace) -> str:
    """Return the command line that resumes this search."""
    import shlex

    words = ["ampwise", "search", args.function]
    for option, default in DEFAULTS.items():
        if getattr(args, option) != default:
            words += [f"--{option}", str(getattr(args, option))]
    for option in ("trials", "gpu", "device", "out"):
        if getattr(args, option):
            words += [f"--{option}", str(getattr(args, option))]
    for pattern in args.modules:
        words += ["--modules", pattern]
    words += [f"--{option}" for option in ("force", "json", "quiet") if getattr(args, option)]
    return shlex.join([*words, "--resume"])
