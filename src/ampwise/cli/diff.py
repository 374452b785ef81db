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

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from ampwise.tune.diff.result import Difference

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="makes model, batch and loss: module:function")
    parser.add_argument("--a", metavar="SIDE", default="fp32", help="the reference (default: fp32)")
    parser.add_argument("--b", metavar="SIDE", default="bf16", help="the side to compare with it (default: bf16)")
    parser.add_argument("--device", metavar="NAME", help="where the model is made (default: cuda if there is one)")
    parser.add_argument("--batch", metavar="ROWS", type=int, help="rows in the batch (default: the function's own)")
    parser.add_argument(
        "--modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only modules whose names match, such as 'blocks.3.*'; may be repeated",
    )
    parser.add_argument("--ops", action="store_true", help="also compare each operation, with its source line")
    parser.add_argument("--all", action="store_true", help="show every row, not only the worst")
    parser.add_argument("--no-floor", action="store_true", help="do not measure the difference between two runs of a")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page with plots")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite a file that is not an earlier page")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from ampwise.report.page.page_file import check_page_path, write_page

    page_path = None if args.html is None else Path(args.html)
    if page_path is not None:
        check_page_path(page_path, "--html", force=args.force)  # before anything is run
    result = _difference(args)
    if page_path is not None:
        write_page(result.page, page_path, "--html", force=args.force)
    _print(result, page_path, args)
    return 0 if result.explained else 1


def _difference(args: argparse.Namespace) -> Difference:
    _need_torch()
    import torch

    from ampwise.tune.diff.diff import DiffOptions, compare_sides
    from ampwise.tune.diff.names import find_models
    from ampwise.tune.diff.side import parse_side
    from ampwise.tune.train_case import load_factory

    a, b = parse_side(args.a), parse_side(args.b)
    device = _device(args.device)
    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr), _progress(args.quiet) as progress:
        maker = load_factory(args.function)
        progress("making the model")
        torch.manual_seed(0)
        subject = maker.make(device, args.batch)
        models = {"": subject.model, **_others(find_models(subject.loss_fn, (), {}), subject.model)}
        options = DiffOptions(ops=args.ops, modules=tuple(args.modules), floor=not args.no_floor, progress=progress)
        return compare_sides(
            subject.loss_fn, subject.args, subject.kwargs, models, a, b, options, subject=args.function
        )


def _others(models: dict[str, torch.nn.Module], main: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the models used by the loss function that are not part of the model that was returned."""
    inside = set(main.modules())
    return {name: model for name, model in models.items() if model not in inside and main not in set(model.modules())}


def _device(name: str | None) -> torch.device:
    from ampwise.trace.capsule.capsule_replay import device_named

    return device_named(name, "cuda")


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise diff needs torch: pip install 'ampwise[torch]'") from error


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current phase on stderr: in place on a terminal, else one line per phase."""
    from ampwise.finding.terminal import console, printable, say

    if quiet:
        yield lambda text: None
    elif not sys.stderr.isatty():
        yield lambda text: say("diff: {}", text)
    else:
        from rich.text import Text

        with console(sys.stderr).status("diff") as status:
            yield lambda text: status.update(Text(printable(f"diff: {text}")))  # Text: a name is not markup


def _print(result: Difference, page_path: Path | None, args: argparse.Namespace) -> None:
    from ampwise.finding.terminal import console, say, wants_colour, write

    if args.json:
        from ampwise.finding.strict_json import dumps

        write(dumps(result.as_dict()), sys.stdout)
        return
    from ampwise.tune.diff.text import difference_text

    text = difference_text(result, colour=wants_colour(sys.stdout), width=console().width, everything=args.all)
    write(text, sys.stdout)
    if page_path is not None:
        say("Wrote {}", page_path, stream=sys.stdout)
