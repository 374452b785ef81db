"""Train as usual, watch for trouble, and record what happens.

The script gives the same results as without ampwise: its arguments, output, exceptions and exit code are its own. On
stderr, a line says when something goes bad, and a summary at the end has the findings; the record has all of them.

Examples:
  ampwise run train.py --epochs 3
  ampwise run -o runs/first train.py
  ampwise run -m my_package.train --config small.yaml
  ampwise run -o runs/two -m torch.distributed.run --nproc-per-node 2 train.py
  ampwise run --activations train.py
  ampwise run --capsule capsules train.py
  ampwise run --sink tensorboard --sink jsonl:metrics.jsonl train.py
  ampwise report runs/first --json

Options of ampwise come before the script; everything after it belongs to the script. Without -o the record goes to
ampwise-runs/, in a folder named after the script and the time. Under torchrun, each process writes a part of it.

The exit code is the script's own: 0 on success, 1 after an exception, 130 after Ctrl-C, or what it passes to sys.exit.
2 means that ampwise could not start: no such file, no torch in the Python that ampwise is installed in, or a folder
that already has a record (-f overwrites it).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli._arguments import RUNS, count
from ampwise.errors import BadInput, MissingDependency
from ampwise.finding.terminal import console, say, wants_colour, write

if TYPE_CHECKING:
    from typing import TextIO

    from ampwise.watch.script import ScriptToRun

GROUP = "Find bugs"
SCRIPT_OWNS_STREAMS = True  # Python flushes and closes them, as it does without ampwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ampwise.runs.sinks import built_in_kinds

    add = parser.add_argument
    add("-o", "--output", metavar="RUN", help=f"the record's folder (default: a new one in {RUNS}/)")
    add("-f", "--force", action="store_true", help="overwrite an existing record")
    add("-q", "--quiet", action="store_true", help="print nothing but sinks that failed")
    add("-v", "--verbose", action="store_true", help="also print layers, times, and what was fine")
    add("--every", metavar="N", type=count, help="histogram of the gradients at every N-th step")
    add("--activations", action="store_true", help="also watch the outputs of modules")
    add("--no-timing", action="store_true", help="do not measure where the time goes")
    add("--capsule", metavar="DIR", help="save bad steps there, for `ampwise replay`")
    add("--no-weights", action="store_true", help="leave the model's weights out of capsules")
    add(
        "--sink",
        metavar="NAME[:TARGET]",
        dest="sinks",
        action="append",
        default=[],
        help=f"also send each step's metrics to: {', '.join(built_in_kinds())}; may be repeated",
    )
    add("--part", action="store_true", help=argparse.SUPPRESS)  # part of a run that another process began
    add("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    add("script", metavar="SCRIPT", help="the script to run")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    from ampwise.watch.script import ScriptToRun, is_launcher

    script = ScriptToRun(args.script, tuple(args.args), args.module)
    if not is_launcher(script):  # torchrun is found by its name
        script.check()
    if importlib.util.find_spec("torch") is None:  # the script would fail at its first import without saying why
        raise MissingDependency(
            f"ampwise run needs torch, which is not installed in this Python: {sys.executable}. Scripts run in the "
            "Python that ampwise is installed in: install it in the script's environment, pip install "
            "'ampwise[torch]'. (pipx and uvx use an environment of their own.)"
        )
    if args.capsule is not None:
        path = Path(args.capsule).absolute()
        existing = next(each for each in (path, *path.parents) if os.path.lexists(each))  # the rest is made when needed
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            why = "is not writable" if existing.is_dir() else "is not a folder"
            raise BadInput(f"--capsule {args.capsule}: {existing} {why}. Name another folder.")
    if args.output:
        folder = Path(args.output)
    elif (together := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:  # torchrun: one folder for all ranks
        folder = Path(RUNS) / f"{script.stem}-{together}-{os.environ.get('MASTER_PORT', '')}"
    else:
        base = Path(RUNS) / f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        tries = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in range(1, 1000))
        folder = next(path for path in tries if not path.exists())
    return _launched(script, folder, args) if is_launcher(script) else _watched(script, folder, args)


def _watched(script: ScriptToRun, folder: Path, args: argparse.Namespace) -> int:
    from ampwise.watch.watched_run import RunOptions, WatchedRun, rank_here, say_on_stderr

    options = RunOptions(
        every=args.every,
        activations=args.activations,
        timing=not args.no_timing,
        sinks=tuple(args.sinks),
        capsules=None if args.capsule is None else Path(args.capsule).absolute(),  # the script may change directory
        weights=not args.no_weights,
        quiet=args.quiet,
    )
    absolute = folder.absolute()
    is_first = not args.output and not absolute.parent.exists()
    try:
        running = WatchedRun(script, absolute, options, force=args.force)
    except BadInput as error:
        if not args.part:
            raise
        say("ampwise: warning: this process runs unwatched: {}", error)
        return script.run().exit_code
    if is_first:  # records do not belong into a commit
        with suppress(OSError), (absolute.parent / ".gitignore").open("x", encoding="utf-8") as file:
            file.write("*\n")
    for name in ("stdout", "stderr"):  # streams that the shell closed are None, as in plain Python
        if getattr(sys, f"__{name}__") is None:
            setattr(sys, name, None)
    ended = running.run()
    if not args.part and not running.is_child and rank_here()[0] == 0:
        with suppress(OSError):  # the current directory was removed
            absolute = folder if folder.absolute() == absolute else absolute
        try:
            _show(absolute, args)
        except Exception as error:  # e.g. too many open files; the exit code stays the script's
            say_on_stderr("ampwise: warning: the report cannot be shown: {}: {}", type(error).__name__, error)
    return ended.exit_code


def _launched(script: ScriptToRun, folder: Path, args: argparse.Namespace) -> int:
    from ampwise.runs.layout import prepare_folder
    from ampwise.runs.sinks import requested_sinks
    from ampwise.watch.findings import add_findings_of_ranks
    from ampwise.watch.script import launch

    # Check these before any process is started.
    requested_sinks(args.sinks, base=folder)
    prepare_folder(folder, rank=0, world_size=1, force=args.force)
    options = [
        "-f",
        *(["-q"] if args.quiet else []),
    ]  # the folder was prepared above, and a process that torchrun restarts overwrites its part
    options += [f"--every={args.every}"] if args.every else []
    options += ["--activations"] if args.activations else []
    options += ["--no-timing"] if args.no_timing else []
    options += [f"--capsule={args.capsule}"] if args.capsule else []
    options += ["--no-weights"] if args.no_weights else []
    options += [f"--sink={sink}" for sink in args.sinks]
    ended = launch(script, folder, options)
    add_findings_of_ranks(folder)
    _show(folder, args)
    return ended.exit_code


def _show(folder: Path, args: argparse.Namespace) -> None:
    """Print the summary to stderr, since stdout belongs to the script; with --quiet only the sinks that failed."""
    from ampwise.report.run_text import run_text
    from ampwise.runs.reader import Run
    from ampwise.runs.sinks.run_sinks import SINK_FAILED
    from ampwise.watch.watched_run import say_on_stderr, write_to_stderr

    if args.quiet and not args.sinks:
        return
    try:
        record = Run.read(folder, layers_of_others=False)
    except BadInput:  # torchrun started no process, and has reported why
        return
    if args.quiet:
        for event in record.events:
            if event.name == SINK_FAILED:
                say_on_stderr("ampwise: warning: {}", event)
        return

    def show(stream: TextIO) -> None:
        text = run_text(record, colour=wants_colour(stream), width=console(stream).width, verbose=args.verbose)
        write("\n" + text, stream)

    with suppress(Exception):  # the script's output comes first; Python itself reports what cannot be written
        sys.stdout.flush()
    write_to_stderr(show)
