"""Run a training script as it is, watch how it uses mixed precision, and leave a record.

The script is not changed, and its results are those of a run that nobody watches: its arguments, output, exceptions
and exit code are its own. What was found comes at its end, on stderr; the record has all of it.

Examples:
  ampwise run train.py --epochs 3
  ampwise run -o runs/first train.py
  ampwise run -m my_package.train --config small.yaml
  ampwise run -o runs/two -m torch.distributed.run --nproc-per-node 2 train.py
  ampwise run --activations train.py
  ampwise run --capsule capsules train.py
  ampwise run --sink tensorboard --sink jsonl:metrics.jsonl train.py
  ampwise report runs/first --json

Options of ampwise come before the script; all that follows it is the script's. Without -o the record goes to
ampwise-runs/, in a folder named after the script and the time. torchrun's processes each write a part of it.

The exit code is the script's own: 0 when it ended well, 1 after an exception, 130 after Ctrl-C, else what it said.
2 means that ampwise could not begin: no such file, no torch in the Python that ampwise is installed in, or a folder
that has a record already (-f writes over it).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from ampwise.errors import BadInput, MissingDependency

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TextIO

    from ampwise.watch.script import Script

__all__ = ["add_arguments", "run"]

HOME = "ampwise-runs"
STREAMS_ARE_THE_SCRIPTS = True  # how they end is Python's business, as it is where nobody watches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ampwise.sinks import built_in_kinds

    parser.add_argument("-o", "--output", metavar="RUN", help=f"the record's folder (default: a new one in {HOME}/)")
    parser.add_argument("-f", "--force", action="store_true", help="write over a record that is there")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing at the end, but of sinks that failed")
    parser.add_argument("--every", metavar="N", type=_count, help="count gradients by powers of two at each N-th step")
    parser.add_argument("--activations", action="store_true", help="look at what modules put out, too")
    parser.add_argument("--no-timing", action="store_true", help="do not look at where the time goes")
    parser.add_argument("--capsule", metavar="DIR", help="save steps that go bad there, for `ampwise replay`")
    parser.add_argument("--no-weights", action="store_true", help="leave the model's weights out of capsules")
    parser.add_argument(
        "--sink",
        metavar="NAME[:TARGET]",
        dest="sinks",
        action="append",
        default=[],
        help=f"send each step's numbers there, too: {', '.join(built_in_kinds())}; may be given several times",
    )
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # of a run that another process began
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="what to run")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")


def run(args: argparse.Namespace) -> int:
    from ampwise.watch.launching import is_launcher
    from ampwise.watch.script import Script

    script = Script(args.script, tuple(args.args), args.module)
    if not is_launcher(script):  # torchrun by its name alone will do
        script.check()
    _check_torch()
    _check_capsules(args)
    folder = Path(args.output) if args.output else _new_folder(script)
    return _launched(script, folder, args) if is_launcher(script) else _watched(script, folder, args)


def _check_torch() -> None:
    """Else the script would fail at its first line, and not say why: `pipx run` has an environment of its own."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            f"ampwise run needs torch, and this Python has none: {sys.executable}. A script runs in the Python that "
            "ampwise is installed in: install it beside the script's own packages, pip install 'ampwise[torch]'. "
            "(What pipx and uvx run has an environment of its own.)"
        )


def _check_capsules(args: argparse.Namespace) -> None:
    """Before hours of training, at the end of which there would be no room for what went bad in them."""
    import os

    if args.capsule is None:
        return
    path = Path(args.capsule).absolute()
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))  # what is missing is made when needed
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is not a folder"
        raise BadInput(f"--capsule {args.capsule}: {there} {why}. Name another folder.")


def _watched(script: Script, folder: Path, args: argparse.Namespace) -> int:
    from ampwise.watch.running import Options, Running, rank_here
    from ampwise.watch.saying import say_if_open

    options = Options(
        every=args.every,
        activations=args.activations,
        timing=not args.no_timing,
        sinks=tuple(args.sinks),
        capsules=None if args.capsule is None else Path(args.capsule).absolute(),  # the script may go elsewhere
        weights=not args.no_weights,
    )
    place = Place(folder)
    try:
        running = Running(script, place.absolute, options, force=args.force)
    except BadInput as error:
        if not args.part:
            raise
        from ampwise.printers.terminal import say

        say("ampwise: warning: this process runs unwatched: {}", error)
        return script.run().exit_code
    _close_streams()
    ended = running.run()
    if not args.part and not running.is_child and rank_here()[0] == 0:
        try:
            _say_of_sinks(place.now, args) if args.quiet else _show(place.now)
        except Exception as error:  # no file may be opened any more, say: the exit code stays the script's
            say_if_open("ampwise: warning: the report cannot be shown: {}: {}", type(error).__name__, error)
    return ended.exit_code


class Place:
    """The record's folder: the script may go elsewhere, and it is then called by its full name."""

    def __init__(self, folder: Path) -> None:
        self._given, self.absolute = folder, folder.absolute()

    @property
    def now(self) -> Path:
        try:
            return self._given if self._given.absolute() == self.absolute else self.absolute
        except OSError:  # the folder that the script is in has been removed
            return self.absolute


def _close_streams() -> None:
    """Streams that the shell has closed are None to a script, as in plain Python."""
    for name in ("stdout", "stderr"):
        if getattr(sys, f"__{name}__") is None:
            setattr(sys, name, None)


def _launched(script: Script, folder: Path, args: argparse.Namespace) -> int:
    from ampwise.record.layout import make_room
    from ampwise.sinks import openings
    from ampwise.watch.launching import launch

    # Before anything is started that would have to stop.
    openings(args.sinks, base=folder)
    make_room(folder, rank=0, world_size=1, force=args.force)
    options = ["-f"]  # room was made; and a process that torchrun starts again writes over what it had begun
    options += [f"--every={args.every}"] if args.every else []
    options += ["--activations"] if args.activations else []
    options += ["--no-timing"] if args.no_timing else []
    options += [f"--capsule={args.capsule}"] if args.capsule else []
    options += ["--no-weights"] if args.no_weights else []
    options += [f"--sink={sink}" for sink in args.sinks]
    ended = launch(script, folder, options)
    _judge_ranks(folder)
    _say_of_sinks(folder, args) if args.quiet else _show(folder)
    return ended.exit_code


def _say_of_sinks(folder: Path, args: argparse.Namespace) -> None:
    """Those that failed, in a line each, also to who wants to hear nothing: they are where nobody looks."""
    if not args.sinks:
        return
    from ampwise.record.reader import Run
    from ampwise.rules.run.sink_failed import RULE
    from ampwise.watch.saying import say_if_open

    try:
        found = [seen.finding for seen in Run.read(folder, layers_of_others=False).findings]
    except BadInput:
        return
    for finding in found:
        if finding.rule.code == RULE.code:
            say_if_open("ampwise: warning: {} {}: {}", RULE.code, RULE.name, finding.message)


def _show(folder: Path) -> None:
    """The summary, on stderr: stdout is the script's."""
    from ampwise.printers.terminal import console, wants_colour, write
    from ampwise.record.reader import Run
    from ampwise.report.summary import summary
    from ampwise.watch.saying import on_stderr

    try:
        record = Run.read(folder, layers_of_others=False)
    except BadInput:  # torchrun has started nothing, and said why
        return

    def show(stream: TextIO) -> None:
        write("\n" + summary(record, colour=wants_colour(stream), width=console(stream).width), stream)

    with suppress(Exception):  # what the script has to say comes first; what cannot be written, Python reports itself
        sys.stdout.flush()
    on_stderr(show)


def _judge_ranks(folder: Path) -> None:
    """What shows only when the parts of all ranks are seen together."""
    from ampwise.watch.ranks import add_findings_of_ranks

    add_findings_of_ranks(folder)


def _new_folder(script: Script) -> Path:
    import os
    import time

    together = os.environ.get("TORCHELASTIC_RUN_ID")
    if together is not None:  # started by torchrun: one folder for all ranks
        return Path(HOME) / f"{script.stem}-{together}-{os.environ.get('MASTER_PORT', '')}"
    base = Path(HOME) / f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in range(1, 1000))
    return next(path for path in taken if not path.exists())


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is expected")
    return int(text)
