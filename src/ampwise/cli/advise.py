"""Recommend a precision for a model and a GPU, with reasons.

The device decides first (tensor cores, emulation, memory), then the model (size, kind, parts that 16 bits
hurt), then the symptom, then your measurement. Every number says what it is based on: measured, derived, or
a datasheet. Without --gpu the advice is for this machine; without any argument, on a terminal, it asks.

MAKE is your function that makes the model and a batch, train.py:make; `ampwise init train.py` writes one. It is
called once, on the meta device: nothing is allocated or run. --params and --arch describe a model without one.

Examples:
  ampwise advise
  ampwise advise train.py:make --gpu h200
  ampwise advise --params 7B --arch transformer --gpu a100
  ampwise advise --gpu v100-sxm2-16 --want bf16
  ampwise advise --gpu v100-sxm2-16 --scaling manual:1000
  ampwise advise --symptom nan --idea autocast-off
  ampwise advise --ideas
  ampwise advise --gpu h100-sxm --params 124M --json | jq -r .precision

The exit code is 0 with advice, 1 if something that you wanted or proposed is rejected, and 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from ampwise.cli import print_json
from ampwise.cli._arguments import add_make, check_gpu
from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.finding.terminal import say, wants_colour, write

GROUP = "Choose a precision"
TAKES_CAPABILITY = True  # --gpu may be 8.6, sm_86 or cpu
PIPE_WIDTH = 110
NARROWEST = 40
QUESTION = ("make", "params", "arch", "gpu", "want", "scaling", "symptom", "idea", "measured")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser, nargs="?")
    add("--params", metavar="N", help="how many parameters: 124M, 7B, 1.3e9")
    add("--arch", metavar="KIND", help="the kind of model: transformer, cnn, …; --ideas lists them")
    add("--gpu", metavar="NAME", help="a device (a100, rtx4090; `ampwise gpu --list`), a capability (8.6), or cpu")
    add("--want", metavar="PRECISION", help="the precision you want: fp16, bf16, tf32, fp8, …")
    add("--scaling", metavar="HOW", help="how to scale the loss: none, dynamic, manual or manual:1000")
    add("--symptom", metavar="NAME", help="what goes wrong: nan, slow, memory, …; --ideas lists them")
    add("--idea", metavar="NAME", action="append", default=[], help="what was proposed; may be repeated; see --ideas")
    add("--measured", metavar="X", help="the speed-up of 16 bits over FP32, as you measured it: 1.8")
    add("--ideas", action="store_true", help="list ideas, symptoms and kinds of model")
    add("--json", action="store_true", help="JSON, as `ampwise schema advise` describes it")


def run(args: argparse.Namespace) -> int:
    if args.ideas:
        return _list()
    asked = {name: getattr(args, name) for name in QUESTION}
    on_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal and not args.json and not any(asked.values()):
        asked |= _ask()
        if asked["gpu"]:
            check_gpu(asked["gpu"], or_capability=True)
    measured = asked.pop("measured")
    try:
        measured = None if measured is None else float(measured.removesuffix("x").removesuffix("×"))
    except ValueError:
        raise BadInput(f"--measured {measured!r}: expected a number such as 1.8.") from None
    from ampwise.tune.advise import advise
    from ampwise.tune.advise.advice import as_text

    with contextlib.redirect_stdout(sys.stderr):  # keep what the user's code prints out of our output
        advice = advise(asked.pop("make"), ideas=asked.pop("idea"), measured=measured, **asked)
    if args.json:
        print_json(advice.as_dict())
    else:
        write(as_text(advice, width=_width(), colour=wants_colour(sys.stdout)), sys.stdout)
    return 1 if advice.refused else 0


def _ask() -> dict[str, str | None]:
    """Ask a few questions; return the answers by option, None where Enter was pressed. Ctrl-C and Ctrl-D leave."""
    from ampwise.hardware.catalog import COMMON_FORMATS
    from ampwise.hardware.target import target_named
    from ampwise.tune.advise.model import KINDS, parse_count
    from ampwise.tune.advise.symptoms import SYMPTOMS

    def one_of(kind: str, known: Iterable[str]) -> Callable[[str], None]:
        def check(answer: str) -> None:
            if answer.lower() not in known:
                raise UnknownName(kind, answer, known, listing=f"Choose one of {', '.join(known)}.")

        return check

    # The option, the question, what Enter means, and what raises an error for a wrong answer.
    device = "Which device? A name of `ampwise gpu --list`, a compute capability, or cpu."
    formats = f"Which precision do you plan to use? {', '.join(COMMON_FORMATS)}"
    questions: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
        ("gpu", device, "this machine", target_named),
        ("params", "How many parameters? 124M, 7B, …", "unknown", parse_count),
        ("arch", f"What kind of model? {', '.join(KINDS)}", "unknown", one_of("kind of model", KINDS)),
        ("want", formats, "none", one_of("precision", COMMON_FORMATS)),
        ("symptom", f"What goes wrong? {', '.join(SYMPTOMS)}", "nothing", one_of("symptom", SYMPTOMS)),
    )

    def answer(question: str, default: str, check: Callable[[str], Any]) -> str | None:
        while True:
            given = input(f"{question} [{default}] ").strip()
            if given.lower() in ("", default):
                return None
            try:
                check(given)
            except AmpwiseError as error:
                say("  {}", error)
            else:
                return given

    say("A few questions; Enter accepts the default in brackets, Ctrl-C quits.")
    try:
        return {option: answer(question, default, check) for option, question, default, check in questions}
    except EOFError:
        say("")
        raise KeyboardInterrupt from None


def _list() -> int:
    from ampwise.tune.advise.claims import IDEAS
    from ampwise.tune.advise.model import KINDS
    from ampwise.tune.advise.symptoms import SYMPTOMS

    shown = []
    for title, entries in (("--idea", IDEAS), ("--symptom", SYMPTOMS), ("--arch", KINDS)):
        shown.append(title)
        column = max(map(len, entries)) + 4
        lines = textwrap.TextWrapper(_width(), subsequent_indent=" " * column, break_long_words=False)
        for name, text in entries.items():
            lines.initial_indent = f"  {name}".ljust(column)
            shown.append(lines.fill(text))
    write("\n".join([*shown, ""]), sys.stdout)
    return 0


def _width() -> int:
    """Return the width of the terminal, at most a readable one."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return max(NARROWEST, min(PIPE_WIDTH, shutil.get_terminal_size().columns)) if is_known else PIPE_WIDTH
