"""Recommend a precision to train in, with reasons, and reject what will not work.

The device decides first (tensor cores, emulation, memory), then the model (size, kind, parts that 16 bits
hurt), then the symptom, then your measurement. Every number says what it is based on: measured, derived, or
a datasheet. Without --gpu the advice is for this machine; without any argument, on a terminal, it asks.

SUBJECT is a function that makes model, batch and loss, as module:callable or file.py:callable. It is called
once, on the meta device: nothing is allocated or run. --params and --arch describe a model without one.

Examples:
  ampwise advise
  ampwise advise train:make --gpu h200
  ampwise advise --params 7B --arch transformer --gpu a100-40
  ampwise advise --gpu v100-sxm2-16 --want bf16
  ampwise advise --gpu v100-sxm2-16 --scaling manual:1000
  ampwise advise --symptom nan --idea autocast-off
  ampwise advise --ideas
  ampwise advise --gpu h100-sxm --params 124M --json | jq -r .precision

The exit code is 0 with advice, 1 if something that you wanted or proposed is rejected, and 2 on an error.

With --json: {precision, refused, asked, why, loss_scale, keep_fp32, tf32, compile, speedup, speedup_why,
triage, changes, findings, code}
  precision   fp32, tf32, fp16, bf16, fp8; auto if the device is unknown
  why         [{text, basis}], the basis one of read here, measured by you, measured on one H200,
              derived, datasheet, rule
  loss_scale  {init_scale, growth_factor, backoff_factor, growth_interval, why}, or null if none is needed
  keep_fp32   [{what, why, how, by_itself, patterns, modules}]
  speedup     {low, high, ceiling, over, approximate, measured, basis}, or null if peaks are unknown
  findings    as elsewhere; in evidence: answer (no or careful), costs by choice, to_know {command, tells}, and
              refuses, the precision that is rejected
  code        {torch, ampwise}: Python to paste
Unknown values are null.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ampwise.tune.advise.advice import Advice

__all__ = ["add_arguments", "run"]

PIPE_WIDTH = 110
NARROWEST = 40
QUESTION = ("subject", "params", "arch", "gpu", "want", "scaling", "symptom", "idea", "measured")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="SUBJECT", nargs="?", help="module:callable that makes model, batch, loss")
    parser.add_argument("--params", metavar="N", help="how many parameters: 124M, 7B, 1.3e9")
    parser.add_argument("--arch", metavar="KIND", help="the kind of model: transformer, cnn, …; --ideas lists them")
    parser.add_argument(
        "--gpu", metavar="NAME", help="a device (a100, rtx4090; `ampwise gpu --list`), a capability (8.6), or cpu"
    )
    parser.add_argument("--want", metavar="PRECISION", help="the precision you want: fp16, bf16, tf32, fp8, …")
    parser.add_argument("--scaling", metavar="HOW", help="how to scale the loss: none, dynamic, manual or manual:1000")
    parser.add_argument("--symptom", metavar="NAME", help="what goes wrong: nan, slow, memory, …; --ideas lists them")
    parser.add_argument(
        "--idea", metavar="NAME", action="append", default=[], help="what was proposed; may be repeated; see --ideas"
    )
    parser.add_argument("--measured", metavar="X", help="the speed-up of 16 bits over FP32, as you measured it: 1.8")
    parser.add_argument("--ideas", action="store_true", help="list ideas, symptoms and kinds of model")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")


def run(args: argparse.Namespace) -> int:
    if args.ideas:
        return _list()
    asked = {name: getattr(args, name) for name in QUESTION}
    if _asks(args):
        from ampwise.cli import say_which_gpu

        asked |= _ask()
        if asked["gpu"]:
            say_which_gpu(asked["gpu"])
    advice = _advice(asked)
    if args.json:
        from ampwise.finding.strict_json import dumps

        _write(dumps(advice.as_dict()))
    else:
        _show(advice)
    return 1 if advice.refused else 0


def _asks(args: argparse.Namespace) -> bool:
    """Whether to ask questions: no argument was given, and stdin and stdout are a terminal."""
    no_arguments = not args.json and not any(getattr(args, name) for name in QUESTION)
    return no_arguments and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _ask() -> dict[str, str | None]:
    """Ask a few questions; return the answers by option, None where Enter was pressed. Ctrl-C and Ctrl-D leave."""
    from ampwise.finding.terminal import say
    from ampwise.hardware.catalog import COMMON_FORMATS
    from ampwise.hardware.target import target_named
    from ampwise.tune.advise.model import KINDS, parse_count
    from ampwise.tune.advise.symptoms import SYMPTOMS

    # The option, the question, what Enter means, and what checks an answer.
    device = "Which device? A name of `ampwise gpu --list`, a compute capability, or cpu."
    formats = f"Which precision do you plan to use? {', '.join(COMMON_FORMATS)}"
    questions: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
        ("gpu", device, "this machine", target_named),
        ("params", "How many parameters? 124M, 7B, …", "unknown", parse_count),
        ("arch", f"What kind of model? {', '.join(KINDS)}", "unknown", _one_of("kind of model", KINDS)),
        ("want", formats, "none", _one_of("precision", COMMON_FORMATS)),
        ("symptom", f"What goes wrong? {', '.join(SYMPTOMS)}", "nothing", _one_of("symptom", SYMPTOMS)),
    )
    say("A few questions; Enter accepts the default in brackets, Ctrl-C quits.")
    try:
        return {option: _answer(question, default, check) for option, question, default, check in questions}
    except EOFError:
        say("")
        raise KeyboardInterrupt from None


def _answer(question: str, default: str, check: Callable[[str], Any]) -> str | None:
    """Ask until the answer makes sense; ``check`` raises what is wrong with it."""
    from ampwise.errors import AmpwiseError
    from ampwise.finding.terminal import say

    while True:
        answer = input(f"{question} [{default}] ").strip()
        if answer.lower() in ("", default):
            return None
        try:
            check(answer)
        except AmpwiseError as error:
            say("  {}", error)
        else:
            return answer


def _one_of(kind: str, known: Iterable[str]) -> Callable[[str], None]:
    from ampwise.errors import UnknownName

    def check(answer: str) -> None:
        if answer.lower() not in known:
            raise UnknownName(kind, answer, known, listing=f"Choose one of {', '.join(known)}.")

    return check


def _advice(asked: dict[str, Any]) -> Advice:
    import contextlib

    from ampwise.tune.advise import advise

    # Keep what the user's code prints out of our output.
    with contextlib.redirect_stdout(sys.stderr):
        return advise(
            asked["subject"],
            params=asked["params"],
            arch=asked["arch"],
            gpu=asked["gpu"],
            want=asked["want"],
            scaling=asked["scaling"],
            symptom=asked["symptom"],
            ideas=asked["idea"],
            measured=_number(asked["measured"]),
        )


def _number(text: str | None) -> float | None:
    from ampwise.errors import BadInput

    try:
        return None if text is None else float(text.removesuffix("x").removesuffix("×"))
    except ValueError:
        raise BadInput(f"--measured {text!r}: expected a number such as 1.8.") from None


def _show(advice: Advice) -> None:
    from ampwise.finding.terminal import wants_colour
    from ampwise.tune.advise.advice import as_text

    _write(as_text(advice, width=_width(), colour=wants_colour(sys.stdout)))


def _width() -> int:
    """Return the width of the terminal, at most a readable one."""
    import os
    import shutil

    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return max(NARROWEST, min(PIPE_WIDTH, shutil.get_terminal_size().columns)) if is_known else PIPE_WIDTH


def _list() -> int:
    from ampwise.tune.advise.claims import IDEAS
    from ampwise.tune.advise.model import KINDS
    from ampwise.tune.advise.symptoms import SYMPTOMS

    for title, entries in (("--idea", IDEAS), ("--symptom", SYMPTOMS), ("--arch", KINDS)):
        column = max(map(len, entries)) + 4
        _write(f"{title}\n" + "".join(f"{_entry(name, text, column)}\n" for name, text in entries.items()))
    return 0


def _entry(name: str, text: str, column: int) -> str:
    import textwrap

    left = f"  {name}".ljust(column)
    return textwrap.fill(text, _width(), initial_indent=left, subsequent_indent=" " * column, break_long_words=False)


def _write(text: str) -> None:
    from ampwise.finding.terminal import write

    write(text, sys.stdout)
