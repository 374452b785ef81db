"""The command line: one file a verb.

A verb is a module of this package with a docstring (its help), ``add_arguments(parser)`` and ``run(args)``,
which returns the exit code: 0 clean, 1 findings, 2 could not do what was asked. The list of verbs is the
list of files. Verbs import what they need inside ``run``, so that ``ampwise rules`` never pays for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from ampwise.errors import AmpwiseError, UnknownName, nearest
from ampwise.modules import module_names
from ampwise.printers.terminal import CannotWrite, console, flush, say, write, writing

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

__all__ = ["build_parser", "main", "script", "verbs"]

DESCRIPTION = "Mixed-precision training for PyTorch: checked, measured, explained."
EPILOG = "`ampwise VERB --help` explains a verb, with examples."

INTERRUPTED = 130  # 128 + SIGINT, and
READER_GONE = 141  # 128 + SIGPIPE: what a shell reports for a program that the signal ended


def script() -> NoReturn:
    """The command ``ampwise``."""
    only_reads = sys.argv[1:2] == ["check"]
    if only_reads:
        gc.disable()  # see cli/check.py; here it stays off, since there is no afterwards
    try:
        code = main()
    except Exception:  # a fault of ours, whose traceback may quote what was read
        import traceback

        write(traceback.format_exc(), sys.stderr)
        code = 1
    if only_reads:
        # Taking apart the trees of a thousand files takes as long as a third of the check, and nobody needs it.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors raised on purpose become one line and exit code 2, all others stay tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        return _run(words)
    except AmpwiseError as error:
        say("ampwise: error: {}", error)
        return 2
    except CannotWrite as error:
        say("ampwise: error: {}", error)
        _drop_stdout()
        return 2
    except BrokenPipeError:  # `ampwise rules | head`: the reader has gone
        _drop_stdout()
        return READER_GONE
    except KeyboardInterrupt:
        say("ampwise: interrupted")
        return INTERRUPTED


def verbs() -> list[str]:
    """The verbs there are, by scanning this folder."""
    return module_names(__path__)


def build_parser(words: Sequence[str] = ()) -> _Parser:
    """The parser for a command line; when it names a verb, only that verb's file is loaded."""
    parser = _Parser(prog="ampwise", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action=_Version)
    leading = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    named = words[len(leading)] if len(leading) < len(words) else None
    known = verbs()
    if named is not None:
        parser.refuse_options_of_a_verb(leading)
    if named is not None and named not in known:
        raise UnknownName("verb", named, known, listing="`ampwise --help` lists the verbs.")
    subparsers = parser.add_subparsers(metavar="VERB", title="verbs", parser_class=_Parser)
    for name in known if named is None else [named]:
        _add_verb(subparsers, importlib.import_module(f"{__name__}.{name}"))
    return parser


def _run(words: list[str]) -> int:
    parser = build_parser(words)
    ours = True  # the streams
    try:
        args, unknown = parser.parse_known_args(words)
        if unknown:
            getattr(args, "parser", parser).complain(unknown)
        if not hasattr(args, "run"):
            parser.print_help()
            return 0
        ours = not args.streams_are_the_scripts
        return int(args.run(args))
    finally:
        if ours:  # here and not at exit, where a reader who has gone could no longer be met quietly
            flush(sys.stdout)


def _open_streams() -> None:
    """Python has None for a stream that the shell closed (`>&-`): nobody listens, which is no error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (it lives as long as Python)


def _drop_stdout() -> None:
    """What could not be written goes nowhere, else Python complains again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _add_verb(subparsers: argparse._SubParsersAction[_Parser], verb: ModuleType) -> None:
    text = (verb.__doc__ or "").strip()
    name = verb.__name__.rpartition(".")[2]
    # argparse reads % in a help line as a format.
    summary = text.partition("\n")[0].rstrip(".").replace("%", "%%")
    parser = subparsers.add_parser(name, help=summary, description=text)
    verb.add_arguments(parser)
    scripts = getattr(verb, "STREAMS_ARE_THE_SCRIPTS", False)
    parser.set_defaults(run=verb.run, parser=parser, streams_are_the_scripts=scripts)


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and the way to the help, and half an option's name is a mistake."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous after the next option is added.
        # Nothing is printed with this formatter: it is told a width, or it would import shutil to ask for one.
        plain = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
        super().__init__(**{"formatter_class": plain, "allow_abbrev": False, **options})

    def format_help(self) -> str:
        # Only now: argparse makes a formatter for each argument it is told of, and this one imports rich.
        self.formatter_class = _formatter()
        with writing():  # it is rich that writes, though nothing yet
            return super().format_help()

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith((".", "?")) else "."
        say("ampwise: error: {}{} See `{} --help`.", message, stop, self.prog)
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would keep to itself that help could not be written.
        write(message, sys.stderr if file is None else file)

    def refuse_options_of_a_verb(self, leading: Sequence[str]) -> None:
        """`ampwise --json formats`: the verb has the option, but it is asked too early."""
        for option in (word.partition("=")[0] for word in leading):
            if option != "--" and option not in self._option_string_actions:
                self.error(f"unknown option {option!r}; options of a verb come after the verb")

    def complain(self, unknown: Sequence[str]) -> NoReturn:
        """Name the first word that means nothing here; argparse would name the rest with it."""
        word = unknown[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        option = word.partition("=")[0]
        close = nearest(option, self._option_string_actions) if option.startswith("--") else []
        self.error(f"unknown option {option!r}" + (f"; did you mean {' or '.join(close)}?" if close else ""))


class _Version(argparse.Action):
    """--version, looked up only when asked: the metadata costs more than a whole verb."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ampwise.printers.tool import installed_version

        say("ampwise {}", installed_version() or "(a source folder, not installed)", stream=sys.stdout)
        parser.exit()


def _formatter() -> type[argparse.HelpFormatter]:
    try:
        from rich_argparse import RawDescriptionRichHelpFormatter
    except ImportError:  # an environment with torch but without our terminal libraries
        return argparse.RawDescriptionHelpFormatter

    class Formatter(RawDescriptionRichHelpFormatter):
        """Coloured, but a [bracket] in a docstring is a bracket and not markup."""

        text_markup = False
        help_markup = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.console = console()  # without any styles where none are wanted; rich would keep the bold ones

    return Formatter
