"""Run a training step on two sides, such as two precisions, and compare it module by module.

FUNCTION names what makes the model, a batch and the loss, as module:function or file.py:function:

  def make(batch=16):                       # in train.py
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

The function is called after torch.manual_seed(0), so that another run compares the same weights and batch.
The step runs forward and backward with the same weights, batch and random numbers on both sides; nothing is updated.
What each module returns is compared, and the gradients by that; then the gradient of each parameter, as the optimizer
gets it. Each error is held against what rounding explains: the error of what a module was given, and a unit roundoff
for each of its operations. The first place beyond that is named, with its operation and its line.

A side is PRECISION[@DEVICE][,OPTION...]:
  fp32, tf32, fp16 (its loss is scaled), bf16, fp64    as torch computes it
  e4m3, mxfp8, nvfp4, any other of `ampwise formats`   products of the model emulated in that format
  policy.json                                          an ampwise.Policy, as Policy.as_dict() or a search writes it
  compiled, compiled=BACKEND                           by torch.compile: what is returned, and gradients, are compared
  attention=math|flash|efficient|cudnn                 the kernel of scaled_dot_product_attention
  up                                                   MX scales rounded up, so that nothing is cut off: mxfp8,up
  emulated                                             also where torch has the format: tf32,emulated
  scale=NUMBER                                         of the loss (fp16: the largest at which gradients are finite)

Examples:
  ampwise diff train:make
  ampwise diff train:make --b fp16 --all
  ampwise diff train:make --b mxfp8 --html diff.html
  ampwise diff train:make --a "bf16,attention=math" --b "bf16,attention=flash" --device cuda
  ampwise diff train:make --a fp32@cpu --b fp32@cuda
  ampwise diff train:make --modules "blocks.3.*" --ops

The exit code is 0 if rounding explains all of it, 1 if there are findings (something is beyond that, errors pile up,
the function does not do the same twice), and 2 if it could not be run.

With --json, what is not known, or not finite, is null:
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

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from ampwise.tune.diff.result import Difference

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="what makes model, batch and loss: module:function")
    parser.add_argument("--a", metavar="SIDE", default="fp32", help="what is compared with (default: fp32)")
    parser.add_argument("--b", metavar="SIDE", default="bf16", help="what is compared (default: bf16)")
    parser.add_argument("--device", metavar="NAME", help="where the model is made (default: cuda if there is one)")
    parser.add_argument("--batch", metavar="ROWS", type=int, help="the size of the batch (default: the function's own)")
    parser.add_argument(
        "--modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only modules whose names match, such as 'blocks.3.*'; may be repeated",
    )
    parser.add_argument("--ops", action="store_true", help="operation by operation, too, with their lines")
    parser.add_argument("--all", action="store_true", help="every row, not only the worst")
    parser.add_argument("--no-floor", action="store_true", help="do not measure how far two runs of a are apart")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots, too")
    parser.add_argument("-f", "--force", action="store_true", help="write over a file that is no earlier page")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from ampwise.report.page.writing import check_paper, write_page

    paper = None if args.html is None else Path(args.html)
    if paper is not None:
        check_paper(paper, "--html", force=args.force)  # before anything is run
    result = _difference(args)
    if paper is not None:
        write_page(result.page, paper, "--html", force=args.force)
    _print(result, paper, args)
    return 0 if result.explained else 1


def _difference(args: argparse.Namespace) -> Difference:
    _need_torch()
    import torch

    from ampwise.tune.diff.diffing import Options, difference_of
    from ampwise.tune.diff.names import models_of
    from ampwise.tune.diff.side import side_of
    from ampwise.tune.subject import maker_named

    a, b = side_of(args.a), side_of(args.b)
    device = _device(args.device)
    # What the user's code prints is not what was asked for.
    with contextlib.redirect_stdout(sys.stderr), _progress(args.quiet) as progress:
        maker = maker_named(args.function)
        progress("making the model")
        torch.manual_seed(0)
        subject = maker.make(device, args.batch)
        models = {"": subject.model, **_others(models_of(subject.loss_fn, (), {}), subject.model)}
        options = Options(ops=args.ops, modules=tuple(args.modules), floor=not args.no_floor, progress=progress)
        return difference_of(
            subject.loss_fn, subject.args, subject.kwargs, models, a, b, options, subject=args.function
        )


def _others(models: dict[str, torch.nn.Module], main: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Models of the loss function that are no part of the one that was returned."""
    inside = set(main.modules())
    return {name: model for name, model in models.items() if model not in inside and main not in set(model.modules())}


def _device(name: str | None) -> torch.device:
    from ampwise.trace.capsule.rerunning import device_named

    return device_named(name, "cuda")


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise diff needs torch: pip install 'ampwise[torch]'") from error


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: in place on a terminal, a line each elsewhere."""
    from ampwise.printers.terminal import console, printable, say

    if quiet:
        yield lambda text: None
    elif not sys.stderr.isatty():
        yield lambda text: say("diff: {}", text)
    else:
        from rich.text import Text

        with console(sys.stderr).status("diff") as status:
            yield lambda text: status.update(Text(printable(f"diff: {text}")))  # Text: a name is not markup


def _print(result: Difference, paper: Path | None, args: argparse.Namespace) -> None:
    from ampwise.printers.terminal import console, say, wants_colour, write

    if args.json:
        from ampwise.strict_json import dumps

        write(dumps(result.as_dict()), sys.stdout)
        return
    from ampwise.tune.diff.text import difference_text

    text = difference_text(result, colour=wants_colour(sys.stdout), width=console().width, everything=args.all)
    write(text, sys.stdout)
    if paper is not None:
        say("The page is {}", paper, stream=sys.stdout)
