"""Rerun a saved bad step, and find the operation that broke it.

CAPSULE is a folder such as capsules/step-000012. It holds the batch, the random state and, unless they were left out,
the weights; it holds no code. MAKE is your function that makes the model, as for `ampwise bench`: train.py:make, which
`ampwise init train.py` writes. Its batch is not used, and it need not return one: `return model, loss_fn` is enough,
and `return model` for a capsule of `ampwise run`, which holds the inputs of the model. It is called with the
capsule's build_args, which are shown first.

Without MAKE, on a terminal, you are asked whether to call the function that the capsule suggests, if it is in a file
in the current folder. A function is never called just because a capsule names it, and nothing inside the capsule's
folder is imported. A capsule that was changed or damaged is refused.

Examples:
  ampwise replay capsules/step-000012 train.py:make
  ampwise replay capsules/step-000012 train.py:make --precision fp32
  ampwise replay capsules/step-000012 train.py:make --json
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

from ampwise.cli._arguments import add_make, check_precision
from ampwise.errors import BadInput
from ampwise.finding.terminal import printable, say
from ampwise.numbers.formats import find_format
from ampwise.report.printers import add_output_arguments, output_format, print_findings
from ampwise.train.precision.names import EMULATE, PLAIN

if TYPE_CHECKING:
    from ampwise.trace.capsule import CapsuleContents
    from ampwise.trace.capsule.capsule_replay import CapsuleReplay
    from ampwise.trace.user_code import UserFunction

GROUP = "Find bugs"
NEEDS_TORCH = True
FOR_PEOPLE = ("full", "concise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("capsule", metavar="CAPSULE", help="the folder of a capsule")
    add_make(parser, nargs="?")
    add("--precision", metavar="NAME", help="fp32, tf32, fp16, bf16 or emulate:FORMAT (default: the step's own)")
    add("--device", metavar="NAME", help="such as cpu or cuda:1 (default: the step's own, else cpu)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    form = output_format(args)
    if not Path(args.capsule).is_dir():
        raise BadInput(
            f"{args.capsule}: there is no such folder. `ampwise run --capsule capsules train.py` saves bad steps."
        )
    if (args.precision or "").startswith(EMULATE):
        find_format(args.precision.removeprefix(EMULATE).partition("/")[0].partition(",")[0])
    elif args.precision not in (None, "fp8", "bf16-pure"):  # these need special layers, as will be said
        check_precision("--precision", args.precision, (*PLAIN, "emulate:mxfp8"))
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
        builder = _confirmed(args, contents) if args.make is None else builder_named(args.make, home)
        source = builder.place if args.make is not None else builder.said
        called = format_call(builder.function, contents.build_args)
        say("ampwise: calling {} from {}, with the capsule's arguments", called, source)
        # Keep what the user's code prints out of our output.
        with python_path_of(builder), contextlib.redirect_stdout(sys.stderr):
            built = build(builder, contents.build_args, len(contents.args) + len(contents.kwargs))
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
    words = ["ampwise", "replay", args.capsule, f"{builder.place}:{builder.function}"]
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
