"""Run a bad step again that was saved as a capsule, and say which operation went bad first.

CAPSULE is a folder such as capsules/step-000012. It holds the batch, the state of random numbers and, unless they were
left out, the weights; it holds no code. What makes the model and the loss function is yours, and is called with the
capsule's build_args:

  def make(width=64):                       # in train.py
      model = Net(width)
      def loss_fn(x, y):                    # what engine.step was given
          return F.mse_loss(model(x), y)
      return model, loss_fn

A capsule of `ampwise run` has what the model was given: there the model alone will do, `return model`.

The capsule says which function that was, and it is used if it is one of a file in the current folder; --build names
another. Nothing else that a capsule names is loaded or run, and one that was changed or damaged is refused.

Examples:
  ampwise replay capsules/step-000012
  ampwise replay capsules/step-000012 --build train:make
  ampwise replay capsules/step-000012 --precision fp32 --device cpu
  ampwise replay capsules/step-000012 --json

The exit code is 0 if the step is finite, 1 if it is not and 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.printers import add_output_arguments, output_format, print_findings
from ampwise.printers.terminal import say

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.trace.capsule.contents import Contents
    from ampwise.trace.capsule.rerunning import Rerun
    from ampwise.user_code import Named

__all__ = ["add_arguments", "run"]

FOR_PEOPLE = ("full", "concise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capsule", metavar="CAPSULE", help="the folder of a capsule")
    parser.add_argument(
        "--build",
        metavar="FUNCTION",
        help="what makes model and loss function: module:function or file.py:function (default: as the capsule says)",
    )
    parser.add_argument(
        "--precision", metavar="NAME", help="fp32, tf32, fp16, bf16 or emulate:FORMAT (default: the step's own)"
    )
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:1 (default: as the step's own, else cpu)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    form = output_format(args)
    contents, rerun = _rerun(args)
    if rerun.findings:
        print_findings(rerun.findings, form)
        return 1
    if form in FOR_PEOPLE:
        say("{}", _finite(contents, rerun), stream=sys.stdout)
    else:
        print_findings((), form)
        say("{}", _finite(contents, rerun))
    return 0 if rerun.ended.finite else 1


def _rerun(args: argparse.Namespace) -> tuple[Contents, Rerun]:
    _need_torch()
    from ampwise.trace.capsule.building import build, builder_named, own_builder
    from ampwise.trace.capsule.reading import read
    from ampwise.trace.capsule.rerunning import device_named, load_weights, precision_for, rerun
    from ampwise.user_code import python_path

    contents = read(args.capsule, lambda kind: device_named(args.device, kind))
    say("ampwise: {}", _head(contents))
    device = device_named(args.device, contents.device or "cpu")
    precision = precision_for(args.precision, contents, device)
    builder = builder_named(args.build) if args.build is not None else own_builder(contents.build)
    if args.build is None:
        say("ampwise: {}", _announced(builder, contents))
    # What the user's code prints is not what was asked for.
    with python_path(builder), contextlib.redirect_stdout(sys.stderr):
        built = build(builder, contents.build_args)
        load_weights(contents, built.models)
        return contents, rerun(contents, built, device, precision)


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise replay needs torch: pip install 'ampwise[torch]'") from error


def _head(contents: Contents) -> str:
    """What it is, and what was found when it was saved."""
    step = "a step" if contents.step is None else f"step {contents.step}"
    loss = "" if contents.loss is None else f", loss {contents.loss:.6g}"
    found = "".join(f"; found then: {each.rule.code} {each.rule.name}, {each.place}" for each in contents.findings[:1])
    weights = "" if contents.weights else ", without weights"
    precision = f" in {contents.precision}" if contents.precision else ""
    return f"{step}{precision} on {contents.device}{loss}{weights}{found}"


def _announced(builder: Named, contents: Contents) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in contents.build_args.items())
    return f"built as the capsule says, with {builder.function}({arguments[:200]}) of {builder.said}"


def _finite(contents: Contents, rerun: Rerun) -> str:
    """On a step that is finite here, or about which there is nothing else to say."""
    return " ".join((_ending(contents, rerun), *rerun.remarks))


def _ending(contents: Contents, rerun: Rerun) -> str:
    ended, scaled = rerun.ended, rerun.scaled
    what = "the sum of the outputs" if rerun.summed else "the loss"
    loss = f"there is no {what}" if ended.loss is None else f"{what} is {ended.loss:.6g}"
    if not ended.finite:
        return f"not finite in {rerun.precision} on {rerun.device}: {loss}, and no operation was found that made it so."
    told = f"finite in {rerun.precision} on {rerun.device}: {loss}, and so are all {ended.gradients} gradients."
    if scaled is not None and not scaled.finite:
        return (
            f"{told} Only times the loss scale of {contents.scale:g} do {len(scaled.bad)} of them overflow, which is "
            "what a scaler lowers its scale for."
        )
    if rerun.as_it_was and contents.weights:
        return f"{told} The step that was saved was not: it depends on something that a capsule does not hold."
    return told
