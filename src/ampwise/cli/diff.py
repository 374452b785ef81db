"""Compare a training step in two precisions, module by module.

MAKE is your function that makes the model and a batch, train.py:make; `ampwise init train.py` writes one. It
is called after torch.manual_seed(0), so that another run compares the same weights and batch.
The step runs forward and backward with the same weights, batch and random numbers on both sides; nothing is updated.
The outputs of each module and the gradients with respect to them are compared, then the gradient of each parameter as
the optimizer gets it. Each error is compared with what rounding explains: the error of the module's inputs, plus one
unit roundoff for each of its operations. The first place beyond that is reported, with its operation and its line.

A side is PRECISION[@DEVICE][,OPTION...]:
  fp32, tf32, fp16, bf16, fp64   as torch computes it (fp16: a scaled loss)
  e4m3, mxfp8, nvfp4, …          emulated matmuls; `ampwise formats` lists all
  policy.json                    of Policy.as_dict() or `ampwise search`
  compiled, compiled=BACKEND     with torch.compile: compares what is returned
  attention=NAME                 math, flash, efficient or cudnn
  batch=ROWS                     for b: so many rows of the batch at a time
  up                             MX scales rounded up: nothing saturates
  emulated                       emulated even if torch has the format: tf32
  scale=NUMBER                   loss scale (fp16: the largest that is finite)

Examples:
  ampwise diff train.py:make
  ampwise diff train.py:make --b fp16 -v
  ampwise diff train.py:make --b mxfp8 -o diff.html
  ampwise diff train.py:make --a bf16,attention=math --b bf16,attention=flash
  ampwise diff train.py:make --a fp32@cpu --b fp32@cuda
  ampwise diff train.py:make --a bf16 --b bf16,batch=1 --remedies 3
  ampwise diff train.py:make --modules "blocks.3.*" --ops

The exit code is 0 if rounding explains all differences, 1 if there are findings (an error beyond rounding, errors that
accumulate, a step that is not repeatable), and 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ampwise.cli import print_json
from ampwise.cli._arguments import add_make, check_precision, count
from ampwise.errors import BadInput, UnknownName
from ampwise.finding.terminal import console, progress_line, say, wants_colour, write
from ampwise.numbers.formats import all_names
from ampwise.train.precision.names import AUTO, PLAIN

GROUP = "Choose a precision"
NEEDS_TORCH = True
OPTIONS = ("compiled", "attention", "batch", "up", "emulated", "scale")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser)
    add("--a", metavar="SIDE", default="fp32", help="the reference (default: fp32)")
    add("--b", metavar="SIDE", default="bf16", help="the side to compare with it (default: bf16)")
    add("--device", metavar="NAME", help="where the model is made (default: cuda if there is one)")
    add("--batch", metavar="ROWS", type=count, help="rows in the batch (default: the function's own)")
    add(
        "--modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only modules whose names match, such as 'blocks.3.*'; may be repeated",
    )
    add("--ops", action="store_true", help="also compare each operation, with its source line")
    add(
        "--remedies",
        metavar="N",
        type=count,
        help="try policies that bring the log-probabilities of a and b together; verify them on N more batches of MAKE",
    )
    add("--no-floor", action="store_true", help="do not measure the difference between two runs of a")
    add("--json", action="store_true", help="JSON, as `ampwise schema diff` describes it")
    add("-o", "--output", metavar="FILE", help="also write the result as an HTML page")
    add("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    add("-v", "--verbose", action="store_true", help="show every row, not only the worst")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from ampwise.report.page.page_file import check_page_path, write_page

    page_path = None if args.output is None else Path(args.output)
    if page_path is not None:
        check_page_path(page_path, force=args.force)  # before anything is run
    for option, side in (("--a", args.a), ("--b", args.b)):
        _check_side(option, side)
    import torch

    from ampwise.trace.capsule.capsule_replay import device_named
    from ampwise.tune.diff.diff import DiffOptions, compare_sides
    from ampwise.tune.diff.names import find_models
    from ampwise.tune.diff.side import parse_side
    from ampwise.tune.diff.text import difference_text
    from ampwise.tune.train_case import load_factory

    a, b, device = parse_side(args.a), parse_side(args.b), device_named(args.device, "cuda")
    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), progress_line("diff", "diff: {}", quiet=args.quiet) as progress:
        maker = load_factory(args.make)
        progress("making the model")
        torch.manual_seed(0)
        case = maker.make(device, args.batch)
        # What else the loss function uses, which is no part of the model that was returned.
        used, inside = find_models(case.loss_fn, (), {}), set(case.model.modules())
        others = {name: each for name, each in used.items() if each not in inside and case.model not in each.modules()}
        models = {"": case.model, **others}
        held_back = []
        for seed in range(1, (args.remedies or 0) + 1):
            torch.manual_seed(seed)
            more = maker.make(device, args.batch)
            held_back.append((more.args, more.kwargs))
        options = DiffOptions(
            ops=args.ops,
            modules=tuple(args.modules),
            floor=not args.no_floor,
            held_back=tuple(held_back),
            progress=progress,
        )
        result = compare_sides(case.loss_fn, case.args, case.kwargs, models, a, b, options, name=args.make)
    if page_path is not None:
        write_page(result.page, page_path, force=args.force)
    if args.json:
        print_json(result.as_dict())
    else:
        colour, width = wants_colour(sys.stdout), console().width
        write(difference_text(result, colour=colour, width=width, everything=args.verbose), sys.stdout)
        if page_path is not None:
            say("Wrote {}", page_path, stream=sys.stdout)
    return 0 if result.explained else 1


def _check_side(option: str, side: str) -> None:
    """Check the names in PRECISION[@DEVICE][,OPTION...]; their values are checked when torch is there."""
    first, *words = side.replace("+", ",").split(",")
    name = first.partition("@")[0].strip()
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise BadInput(f"{option} {side}: there is no file {name}. `ampwise search -o {name}` writes one.")
    elif name.lower() not in all_names():  # a format that is no precision is emulated
        check_precision(option, name, (*PLAIN, "fp64", AUTO, "e4m3", "mxfp8", "nvfp4"))
    for word in (word.strip().partition("=")[0] for word in words):
        if word not in OPTIONS:
            raise UnknownName(f"option in {option} {side}:", word, OPTIONS, listing=f"There are {', '.join(OPTIONS)}.")
