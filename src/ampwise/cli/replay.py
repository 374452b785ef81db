"""Rerun a bad step that was saved as a capsule, and find the first operation that gave NaN or inf.

CAPSULE is a folder such as capsules/step-000012. It holds the batch, the random state and, unless they were left out,
the weights; it holds no code. --build names a function of yours that makes the model and the loss function. It is
called with the capsule's build_args, which are shown first:

  def make(width=64):                       # in train.py
      model = Net(width)
      def loss_fn(x, y):                    # what engine.step was given
          return F.mse_loss(model(x), y)
      return model, loss_fn

A capsule of `ampwise run` holds the inputs of the model, so a function that returns the model alone is enough.

Without --build, on a terminal, you are asked whether to call the function that the capsule suggests, if it is in a file
in the current folder. A function is never called just because a capsule names it, and nothing inside the capsule's
folder is imported. A capsule that was changed or damaged is refused.

Examples:
  ampwise replay capsules/step-000012 --build train:make
  ampwise replay capsules/step-000012 --build train.py:make --precision fp32 --device cpu
  ampwise replay capsules/step-000012 --build train:make --json
  ampwise replay capsules/step-000012

The exit code is 0 if the step is finite, 1 if it is not, and 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable, say
from ampwise.report.printers import add_output_arguments, output_format, print_findings

if TYPE_CHECKING:
    from ampwise.trace.capsule import CapsuleContents
    from ampwise.trace.capsule.capsule_replay import CapsuleReplay
    from ampwise.trace.user_code import UserFunction

__all__ = ["add_arguments", "run"]

NEEDS_TORCH = True
FOR_PEOPLE = ("full", "concise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("capsule", metavar="CAPSULE", help="the folder of a capsule")
    add(
        "--build",
        metavar="FUNCTION",
        help="makes model and loss function: module:function or file.py:function (default: ask, on a terminal)",
    )
    add("--precision", metavar="NAME", help="fp32, tf32, fp16, bf16 or emulate:FORMAT (default: the step's own)")
    add("--device", metavar="NAME", help="such as cpu or cuda:1 (default: the step's own, else cpu)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    form = output_format(args)
    contents, rerun = _rerun(args)
    if rerun.findings:
        print_findings(rerun.findings, form)
        return 1
    text = " ".join((_result(contents, rerun), *rerun.remarks))
    if form in FOR_PEOPLE:
        say("{}", text, stream=sys.stdout)
    else:
        print_findings((), form)
        say("{}", text)
    return 0 if rerun.ended.finite else 1


def _rerun(args: argparse.Namespace) -> tuple[CapsuleContents, CapsuleReplay]:
    from ampwise.trace.user_code import imports_refused_from, python_path_of

    home = Path(args.capsule)
    with imports_refused_from(home):
        from ampwise.trace.capsule import read
        from ampwise.trace.capsule.builder import build, builder_named, format_call
        from ampwise.trace.capsule.capsule_replay import device_named, load_weights, precision_for, replay_capsule

        contents = read(home, lambda kind: device_named(args.device, kind))
        step = "a step" if contents.step is None else f"step {contents.step}"
        precision = f" in {contents.precision}" if contents.precision else ""
        loss = "" if contents.loss is None else f", loss {contents.loss:.6g}"
        weights = "" if contents.weights else ", without weights"
        found = "".join(
            f"; found then: {each.rule.code} {each.rule.name}, {each.place}" for each in contents.findings[:1]
        )
        say("ampwise: {}", f"{step}{precision} on {contents.device}{loss}{weights}{found}")
        device = device_named(args.device, contents.device or "cpu")
        chosen = precision_for(args.precision, contents, device)
        builder = _confirmed(args, contents) if args.build is None else builder_named(args.build, home)
        source = builder.place if args.build is not None else builder.said
        called = format_call(builder.function, contents.build_args)
        say("ampwise: calling {} from {}, with the capsule's arguments", called, source)
        # Keep what the user's code prints out of our output.
        with python_path_of(builder), contextlib.redirect_stdout(sys.stderr):
            built = build(builder, contents.build_args)
            load_weights(contents, built.models)
            return contents, replay_capsule(contents, built, device, chosen)


def _confirmed(args: argparse.Namespace, contents: CapsuleContents) -> UserFunction:
    """Return the function that the capsule suggests if the user agrees to call it; else BadInput says what to type."""
    from ampwise.trace.capsule.builder import format_call, suggested_builder

    builder = suggested_builder(contents.build, Path(args.capsule))
    what = f"{format_call(builder.function, contents.build_args)} from {printable(builder.said)}"
    if all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        say("ampwise: the capsule suggests calling {}. Call it? [y/N]", what)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return builder
    words = ["ampwise", "replay", args.capsule, "--build", f"{builder.place}:{builder.function}"]
    for option in ("precision", "device"):
        words += [f"--{option}", getattr(args, option)] if getattr(args, option) is not None else []
    command = printable(shlex.join(words))
    raise BadInput(f"the capsule suggests calling {what}, which needs your consent. To call it, run: {command}")


def _result(contents: CapsuleContents, rerun: CapsuleReplay) -> str:
    """Describe a step without findings."""
    ended, scaled = rerun.ended, rerun.scaled
    what = "the sum of the outputs" if rerun.summed else "the loss"
    loss = f"there is no {what}" if ended.loss is None else f"{what} is {ended.loss:.6g}"
    if not ended.finite:
        return f"not finite in {rerun.precision} on {rerun.device}: {loss}, but no operation was found that caused it."
    finite = f"finite in {rerun.precision} on {rerun.device}: {loss}, and all {ended.gradients} gradients are finite."
    if scaled is not None and not scaled.finite:
        return (
            f"{finite} Multiplied by the loss scale of {contents.scale:g}, {len(scaled.bad)} of them overflow; a "
            "scaler then lowers its scale."
        )
    if rerun.as_it_was and contents.weights:
        return f"{finite} The saved step was not: it depends on something that a capsule does not hold."
    return finite
