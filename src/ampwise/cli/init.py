"""Write a `make` function for a script, and check that it runs.

The commands bench, memory, align, diff, search and replay need a function that makes the model, a batch and the loss of
your script. This writes one: it reads SCRIPT, takes the lines that build the model and compute the loss, and puts them
into a new file next to it. SCRIPT is not changed, and is imported only if that does not start training. Then `make` is
called in a process of its own on the CPU, with no network, and one step is run, forward and backward. Where the data is
not on this machine, random tensors of a size that the model takes stand for it.

Examples:
  ampwise init train.py
  ampwise init train.py -o bench_me.py
  ampwise init train.py --args="--model gpt2 --data wikitext"
  ampwise init train.py --no-run

The exit code is 0 if the step ran, 1 if something is left to fill in, and 2 on an error.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.errors import BadInput
from ampwise.finding import terminal

if TYPE_CHECKING:
    from ampwise.tune.init.init import Result

GROUP = "Start"
OUTPUT = "ampwise_make.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="the script that trains, such as train.py")
    add("-o", "--output", metavar="FILE", help=f"the file to write (default: {OUTPUT} next to the script)")
    add("--args", metavar="OPTIONS", default="", help='options of the script, such as --args="--model gpt2 --lr 0.1"')
    add("-f", "--force", action="store_true", help="overwrite FILE")
    add("--no-run", action="store_true", help="write the file without running it")
    add("--timeout", metavar="SECONDS", type=float, default=300.0, help="how long the run may take (default: 300)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from ampwise.tune.init.init import write_make

    output = Path(args.output) if args.output else Path(args.script).with_name(OUTPUT)
    try:
        options = shlex.split(args.args)
    except ValueError as error:
        raise BadInput(f"--args={args.args!r}: {error}; expected options as in a shell.") from error

    def progress(text: str) -> None:
        if not args.quiet:
            terminal.say("ampwise: {}", text)

    result = write_make(
        args.script,
        output,
        force=args.force,
        limit_s=args.timeout,
        run=not args.no_run,
        options=options,
        progress=progress,
    )
    _show(result)
    return 0 if result.complete else 1


def _show(result: Result) -> None:
    say = functools.partial(terminal.say, stream=sys.stdout)
    make = f"{result.output}:make"
    say("{}: {}", result.output, result.headline)
    found = []
    for part in result.found:
        text = part.text if len(part.text) <= 76 else f"{part.text[:75]}…"
        found.append(f"  {part.what:<10} {f'line {part.line}' if part.line else '':<10} {text}")
    for line in [*found, *result.to_do] if result.complete else [*result.to_do, *found]:  # what is wrong comes first
        say("{}", line)
    if result.complete:
        say("next: ampwise bench {}", make)
        say("      ampwise memory {}", make)
