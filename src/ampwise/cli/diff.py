"""Run a training step twice, for example in two precisions, and compare it module by module.

FUNCTION names a function that makes the model, a batch and the loss, as module:function or file.py:function:

  def make(batch=16):                       # in train.py
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

The function is called after torch.manual_seed(0), so that another run compares the same weights and batch.
The step runs forward and backward with the same weights, batch and random numbers on both sides; nothing is updated.
The outputs of each module and the gradients with respect to them are compared, then the gradient of each parameter as
the optimizer gets it. Each error is compared with what rounding explains: the error of the module's inputs, plus one
unit roundoff for each of its operations. The first place beyond that is reported, with its operation and its line.

A side is PRECISION[@DEVICE][,OPTION...]:
  fp32, tf32, fp16 (its loss is scaled), bf16, fp64    as torch computes it
  e4m3, mxfp8, nvfp4, any other of `ampwise formats`   the model's matmuls, emulated in that format
  policy.json                                          an ampwise.Policy, as Policy.as_dict() or a search writes it
  compiled, compiled=BACKEND                           with torch.compile: compares the returned values and gradients
  attention=math|flash|efficient|cudnn                 the kernel of scaled_dot_product_attention
  up                                                   MX scales rounded up, so that nothing saturates: mxfp8,up
  emulated                                             emulate even if torch has the format: tf32,emulated
  scale=NUMBER                                         loss scale (fp16: the largest one with finite gradients)

Examples:
  ampwise diff train:make
  ampwise diff train:make --b fp16 --all
  ampwise diff train:make --b mxfp8 --html diff.html
  ampwise diff train:make --a "bf16,attention=math" --b "bf16,attention=flash" --device cuda
  ampwise diff train:make --a fp32@cpu --b fp32@cuda
  ampwise diff train:make --modules "blocks.3.*" --ops

The exit code is 0 if rounding explains all differences, 1 if there are findings (an error beyond rounding, errors that
accumulate, a step that is not repeatable), and 2 on an error.

With --json, values that are unknown or not finite are null:
  {subject, a, b, verdict, explained, loss_relative_error, first, beyond, growth, modules, returned, parameters, ops,
   noise_floor, findings, notes, basis}
    a, b                {label, precision, device, roundoff, gradient_roundoff, loss, scale, compiled}
    modules             [{module, class, call, calls, depth, only_in, outputs, inputs, gradients}] in the order of calls
    outputs and others  [{part, shape, relative_error, cosine, snr_db, largest_error, largest_at, norm_a, norm_b,
                         norm_error, largest_a, largest_b, zeros_a, zeros_b, bad_a, bad_b, bad_apart, changed,
                         lost_share, expected_error,
                         times_expected, beyond, noise_floor, not_compared}]
    parameters          [{parameter, share_of_rms, and the same}]
    ops                 [{op, module, call, phase, file, line, and the same}] with --ops
    first, beyond       {where, module, class, phase, cause, before, op, shrinks, and the same}
    growth              {forward, backward: {first, last, largest, largest_at, modules, factor}}
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ampwise.cli import print_json
from ampwise.finding.terminal import console, progress_line, say, wants_colour, write

__all__ = ["add_arguments", "run"]

NEEDS_TORCH = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("function", metavar="FUNCTION", help="makes model, batch and loss: module:function")
    add("--a", metavar="SIDE", default="fp32", help="the reference (default: fp32)")
    add("--b", metavar="SIDE", default="bf16", help="the side to compare with it (default: bf16)")
    add("--device", metavar="NAME", help="where the model is made (default: cuda if there is one)")
    add("--batch", metavar="ROWS", type=int, help="rows in the batch (default: the function's own)")
    add(
        "--modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only modules whose names match, such as 'blocks.3.*'; may be repeated",
    )
    add("--ops", action="store_true", help="also compare each operation, with its source line")
    add("--all", action="store_true", help="show every row, not only the worst")
    add("--no-floor", action="store_true", help="do not measure the difference between two runs of a")
    add("--json", action="store_true", help="JSON, as described above")
    add("--html", metavar="FILE", help="also write an HTML page with plots")
    add("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from ampwise.report.page.page_file import check_page_path, write_page

    page_path = None if args.html is None else Path(args.html)
    if page_path is not None:
        check_page_path(page_path, "--html", force=args.force)  # before anything is run
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
        maker = load_factory(args.function)
        progress("making the model")
        torch.manual_seed(0)
        case = maker.make(device, args.batch)
        # What else the loss function uses, which is no part of the model that was returned.
        used, inside = find_models(case.loss_fn, (), {}), set(case.model.modules())
        others = {name: each for name, each in used.items() if each not in inside and case.model not in each.modules()}
        models = {"": case.model, **others}
        options = DiffOptions(ops=args.ops, modules=tuple(args.modules), floor=not args.no_floor, progress=progress)
        result = compare_sides(case.loss_fn, case.args, case.kwargs, models, a, b, options, subject=args.function)
    if page_path is not None:
        write_page(result.page, page_path, "--html", force=args.force)
    if args.json:
        print_json(result.as_dict())
    else:
        colour, width = wants_colour(sys.stdout), console().width
        write(difference_text(result, colour=colour, width=width, everything=args.all), sys.stdout)
        if page_path is not None:
            say("Wrote {}", page_path, stream=sys.stdout)
    return 0 if result.explained else 1
