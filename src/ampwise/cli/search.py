"""Find the cheapest format for each module that still trains.

MAKE is your function that makes the model and a batch, train.py:make; `ampwise init train.py` writes one. It
is called once per batch, each time with another seed; the model of the first call is searched. A format that keeps loss
and gradients close to FP32's is good enough.

Formats of 8 bits and fewer are emulated, so a CPU can tell whether a model could train in FP8 or MXFP8. The error is
the larger of two: the relative difference of the loss, and half of the squared relative error of the gradient, in the
module where it is largest; the latter is the part of a step's progress that is lost. FP32 is compared with itself
first: a tolerance below its own noise is refused. A quarter of the batches is held back to verify the result.

Examples:
  ampwise search train.py:make
  ampwise search train.py:make --formats mxfp8,bf16,fp32 --gpu b200
  ampwise search train.py:make --modules 'blocks.*' -o policy.json
  ampwise search train.py:make -o policy.json --resume

Trials are kept in FILE.part (without -o, in ampwise-search.part) until the search ends: after Ctrl-C, --resume
continues from them, and -f starts over. ampwise.SearchResult.load("policy.json") reads a policy file.

The exit code is 0 if some module can be narrower than FP32, 1 if none was found, 2 on an error, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli import INTERRUPTED, print_json
from ampwise.cli._arguments import add_make, count
from ampwise.errors import BadInput
from ampwise.finding.terminal import say
from ampwise.numbers.formats import find_format
from ampwise.report.result_view import print_result

if TYPE_CHECKING:
    from ampwise.tune.search.result import SearchResult

GROUP = "Choose a precision"
NEEDS_TORCH = True
PART = "ampwise-search.part"
MOST_BATCHES = 16
DEFAULTS = {"formats": "e4m3,bf16,fp32", "tolerance": 0.01, "batches": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser)
    add(
        "--formats",
        metavar="NAMES",
        default=DEFAULTS["formats"],
        help="comma-separated formats to choose from, including fp32 (default: %(default)s; `ampwise formats` lists "
        "all; mxfp8+up rounds scales up)",
    )
    add(
        "--tolerance",
        metavar="NUMBER",
        type=float,
        default=DEFAULTS["tolerance"],
        help="largest error against FP32 (default: %(default)s)",
    )
    add(
        "--batches",
        metavar="COUNT",
        type=count,
        default=DEFAULTS["batches"],
        help="batches to use, at most 16; a quarter is held back (default: %(default)s)",
    )
    add("--modules", metavar="GLOB", action="append", default=[], help="search only these modules; may be repeated")
    add(
        "--trials",
        metavar="COUNT",
        type=count,
        help="try at most this many assignments, and as many again if one fails on the batches held back",
    )
    add("--gpu", metavar="NAME", help="predict the time on this GPU, from `ampwise gpu --list`")
    add("--device", metavar="NAME", help="such as cpu or cuda:1 (default: cuda if there is one)")
    add("-o", "--output", metavar="FILE", help="write the result there, as JSON")
    add("-f", "--force", action="store_true", help="overwrite existing files")
    add("--resume", action="store_true", help="continue from the trials of an interrupted search")
    add("--json", action="store_true", help="JSON, as `ampwise schema search` describes it")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    formats = [name.strip() for name in args.formats.split(",") if name.strip()]
    for name in formats:
        find_format(name.partition("+")[0])
    if "fp32" not in formats or len(formats) < 2:
        raise BadInput(f"--formats {args.formats}: expected fp32, for what must stay wide, and a narrower format.")
    if not args.tolerance > 0:
        raise BadInput(f"--tolerance {args.tolerance:g}: expected a number above 0, such as {DEFAULTS['tolerance']}.")
    if args.batches > MOST_BATCHES:
        raise BadInput(f"--batches {args.batches}: expected 1 to {MOST_BATCHES}; of every four, one is held back.")
    part = Path(f"{args.output}.part" if args.output else PART)
    # Before the search: can the files be written, and would one be overwritten without -f?
    if args.output and (Path(args.output).is_dir() or not os.access(Path(args.output).parent, os.W_OK)):
        raise BadInput(f"search -o {args.output}: cannot write there. Name a file in an existing, writable folder.")
    if args.output and Path(args.output).exists() and not args.force:
        raise BadInput(f"search -o {args.output}: the file exists. Name another one, or overwrite it with -f.")
    if part.exists() and not (args.resume or args.force):
        raise BadInput(
            f"search: {part} has the trials of an interrupted search. Continue with --resume, or start over with -f."
        )
    try:
        found = _search(args, formats, part)
    except KeyboardInterrupt:
        words = [word for word in args.words if word != "--resume"]
        say("\nampwise: interrupted; resume with: {}", shlex.join(["ampwise", *words, "--resume"]))
        return INTERRUPTED
    if args.json:
        print_json(found.as_dict())
    else:
        print_result(found)
    if args.output:  # after printing, so that the result is not lost if the file cannot be written
        found.save(args.output)
        if not args.json:
            say(
                "Wrote {}; load it with ampwise.SearchResult.load({})",
                args.output,
                repr(args.output),
                stream=sys.stdout,
            )
    return 0 if found.narrower else 1


def _search(args: argparse.Namespace, formats: list[str], part: Path) -> SearchResult:
    import torch

    from ampwise.trace.capsule.capsule_replay import device_named
    from ampwise.tune.search.progress import progress_on
    from ampwise.tune.search.search import search
    from ampwise.tune.train_case import load_factory

    if not args.resume:
        part.unlink(missing_ok=True)
    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_on(sys.stderr, quiet=args.quiet) as progress:
        device, maker, cases = device_named(args.device, "cuda"), load_factory(args.make), []
        for seed in range(args.batches):
            torch.manual_seed(seed)
            cases.append(maker.make(device))
        return search(
            cases[0].loss_fn,
            [dict(case.kwargs) or case.args for case in cases],
            tolerance=args.tolerance,
            formats=formats,
            model=cases[0].model,
            modules=args.modules,
            gpu=args.gpu,
            trials=args.trials,
            resume=part,
            progress=progress,
            name=args.make,
        )
