"""The notebook magic ``%%ampwise``: run a cell and watch it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.terminal import wants_colour, write
from ampwise.report.notebook import run_html
from ampwise.report.run_text import run_text
from ampwise.runs.reader import Run
from ampwise.runs.writer import RecordWriter
from ampwise.watch.watch import Watch

__all__ = ["load_ipython_extension"]

WIDTH = 110
NOT_KEPT = "`%%ampwise -o RUN` keeps the record, for `ampwise report RUN`."
HELP = "%%ampwise [-o RUN] [-f] [--every N] [--activations]: run and watch this cell, and show what was found"


class CellFailed(Exception):
    """A watched cell has failed. IPython has already shown its error, which is the cause of this one."""

    def _render_traceback_(self) -> list[str]:
        return []  # IPython prints this instead of a traceback


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise BadInput(f"%%ampwise: {message}. Usage: {HELP}.")


def load_ipython_extension(shell: Any) -> None:
    """Register the magic; ``%load_ext ampwise`` calls this."""
    parser = _Parser(prog="%%ampwise", add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("-f", "--force", action="store_true")
    parser.add_argument("--every", type=int)
    parser.add_argument("--activations", action="store_true")

    def ampwise(line: str, cell: str) -> None:
        _run_cell(shell, parser.parse_args(shlex.split(line)), cell)

    ampwise.__doc__ = HELP
    shell.register_magic_function(ampwise, "cell")


def _run_cell(shell: Any, args: argparse.Namespace, cell: str) -> None:
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(f"{aside}/run" if args.output is None else args.output)
        record = RecordWriter.create(folder, force=args.force, script="this cell")
        watch = Watch(record, every=args.every, activations=args.activations).install()
        try:
            with _watching_names(watch, shell.user_ns):
                result = shell.run_cell(cell)  # this shows an error
        finally:
            error = sys.exc_info()[1]
            failed = error if error is not None else result.error_before_exec or result.error_in_exec
            if isinstance(failed, Exception):
                watch.died(failed)
            watch.close("finished" if failed is None else "failed", None, failed)
        run, kept = Run.read(folder), NOT_KEPT if args.output is None else ""
        text = run_text(run, colour=wants_colour(sys.stdout), width=WIDTH, not_kept=kept)
        if "text/html" in shell.display_formatter.active_types:
            shell.display_pub.publish({"text/html": run_html(run), "text/plain": text}, metadata={})
        else:  # a terminal
            write(text, sys.stdout)
    if failed is not None:  # so that "Run All" stops here; with the traceback, for %debug
        raise CellFailed(f"{type(failed).__name__}: {failed}").with_traceback(failed.__traceback__) from failed


@contextmanager
def _watching_names(watch: Watch, names: dict[str, Any]) -> Iterator[None]:
    """Watch what earlier cells have made or imported: register models, and replace imported functions by wrappers."""
    watch.adopt(names.values())
    changed = {}
    for original, replacement in watch.replaced():
        for name, value in list(names.items()):
            if value is original:
                changed[name], names[name] = original, replacement
    try:
        yield
    finally:
        for name, original in changed.items():
            if name in names:
                names[name] = original
