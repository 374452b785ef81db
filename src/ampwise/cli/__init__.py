"""The command line: one module per command.

A command is a module of this package with a docstring (its help), ``add_arguments(parser)`` and ``run(args)``,
which returns the exit code: 0 clean, 1 findings, 2 error. The modules in this folder are the list of commands.
Commands import what they need inside ``run``, so that ``ampwise explain`` never pays for torch; one that cannot do
without it sets ``NEEDS_TORCH``.
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
from typing import TYPE_CHECKING, Any

from ampwise.errors import AmpwiseError, MissingDependency, UnknownName, nearest
from ampwise.finding.package_modules import module_names
from ampwise.finding.terminal import OutputError, console, flush, output_errors, say, write

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["build_parser", "commands", "main", "print_json", "say_which_gpu", "script", "summaries"]

DESCRIPTION = "Mixed-precision training for PyTorch: checked, measured, explained."
EPILOG = "`ampwise COMMAND --help` explains a command, with examples."

INTERRUPTED = 130  # 128 + SIGINT
READER_GONE = 141  # 128 + SIGPIPE, as a shell reports a program that the signal ended


def script() -> NoReturn:
    """Run the program ``ampwise``."""
    only_reads = sys.argv[1:2] == ["check"]
    if only_reads:
        gc.disable()  # see cli/check.py; it stays off, since the process ends after this command
    try:
        code = main()
    except Exception:  # a bug in ampwise; its traceback may quote what was read
        import traceback

        write(traceback.format_exc(), sys.stderr)
        code = 1
    if only_reads:
        # Freeing the syntax trees of a thousand files would add a third to the time of the check.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an AmpwiseError becomes one line and exit code 2, other exceptions stay tracebacks."""
    for name in ("stdout", "stderr"):  # Python sets streams that the shell closed (`>&-`) to None
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (it lives as long as Python)
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (AmpwiseError, OutputError) as error:
        say("ampwise: error: {}", error)
        if isinstance(error, OutputError):
            _drop_stdout()
        return 2
    except BrokenPipeError:  # `ampwise explain | head`: the reader has gone
        _drop_stdout()
        return READER_GONE
    except KeyboardInterrupt:
        say("ampwise: interrupted")
        return INTERRUPTED


def commands() -> list[str]:
    """Names of all commands: the modules in this folder."""
    return module_names(__path__)


def summaries() -> dict[str, str]:
    """The first line of each command's help, by name."""
    docs = {name: importlib.import_module(f"{__name__}.{name}").__doc__ or "" for name in commands()}
    return {name: doc.strip().partition("\n")[0].rstrip(".") for name, doc in docs.items()}


def build_parser(words: Sequence[str] = ()) -> _Parser:
    """Build the parser for a command line; if it names a command, only that command's module is loaded."""
    parser = _Parser(prog="ampwise", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action=_Version)
    leading = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    named = words[len(leading)] if len(leading) < len(words) else None
    known = commands()
    if named is not None:
        parser.refuse_command_options(leading)
    if named is not None and named not in known:
        raise UnknownName("command", named, known, listing="`ampwise --help` lists the commands.")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    for name in known if named is None else [named]:
        command = importlib.import_module(f"{__name__}.{name}")
        text = (command.__doc__ or "").strip()
        summary = text.partition("\n")[0].rstrip(".").replace("%", "%%")  # argparse reads % as a format
        subparser = subparsers.add_parser(name, help=summary, description=text)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def _run(words: list[str]) -> int:
    parser = build_parser(words)
    flushes = True
    try:
        args, unknown = parser.parse_known_args(words)
        if unknown:
            getattr(args, "parser", parser).refuse_unknown(unknown)
        if not hasattr(args, "command"):
            parser.print_help()
            return 0
        flushes = not getattr(args.command, "SCRIPT_OWNS_STREAMS", False)
        if getattr(args, "gpu", None):
            say_which_gpu(args.gpu)
        try:
            return int(args.command.run(args))
        except ImportError as error:
            if getattr(args.command, "NEEDS_TORCH", False) and sys.modules.get("torch") is None:
                raise MissingDependency(f"{args.parser.prog} needs torch: pip install 'ampwise[torch]'") from error
            raise
    finally:
        if flushes:  # not at exit, where a closed pipe would print a traceback
            flush(sys.stdout)


def say_which_gpu(name: str) -> None:
    """Say which device a family's name, such as "a100", was taken to mean; UnknownName for a name that none has.

    Here, before a command loads torch, since an unknown name should not take seconds.
    """
    from ampwise.hardware.catalog import compute_capability, gpu_named, other_variants

    known_otherwise = name.strip().lower().removeprefix("sm_")
    if known_otherwise == "cpu" or known_otherwise.isdigit() or compute_capability(known_otherwise):
        return  # `ampwise advise` takes these, too
    others = other_variants(name)
    if others:
        say("{}: taken as {}; others: {}", name, gpu_named(name).name, ", ".join(others))


def print_json(value: Any) -> None:
    """Print strict JSON on stdout."""
    from ampwise.finding.strict_json import dumps

    write(dumps(value), sys.stdout)


def _drop_stdout() -> None:
    """Send unwritten output to the null device, or Python reports the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line that names the help, and which takes no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous after the next option is added.
        # Nothing is printed with this formatter; without a width it would import shutil to find one.
        plain = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
        super().__init__(**{"formatter_class": plain, "allow_abbrev": False, **options})

    def format_help(self) -> str:
        # Set here: argparse makes a formatter for each argument that is added, and this one imports rich.
        self.formatter_class = _formatter()
        with output_errors():  # rich touches the stream before anything is written
            return super().format_help()

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith((".", "?")) else "."
        say("ampwise: error: {}{} See `{} --help`.", message, stop, self.prog)
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors when it writes help.
        write(message, sys.stderr if file is None else file)

    def refuse_command_options(self, leading: Sequence[str]) -> None:
        """Refuse `ampwise --json formats`: options of a command come after it."""
        for option in (word.partition("=")[0] for word in leading):
            if option != "--" and option not in self._option_string_actions:
                self.error(f"unknown option {option!r}; options of a command come after the command")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first unknown word only; argparse would list all words after it, too."""
        word = unknown[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        option = word.partition("=")[0]
        close = nearest(option, self._option_string_actions) if option.startswith("--") else []
        self.error(f"unknown option {option!r}" + (f"; did you mean {' or '.join(close)}?" if close else ""))


class _Version(argparse.Action):
    """--version, looked up only on demand: reading package metadata is slower than most commands."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ampwise.finding.version import installed_version

        say("ampwise {}", installed_version() or "(a source folder, not installed)", stream=sys.stdout)
        parser.exit()


def _formatter() -> type[argparse.HelpFormatter]:
    try:
        from rich_argparse import RawDescriptionRichHelpFormatter
    except ImportError:  # rich_argparse is not installed
        return argparse.RawDescriptionHelpFormatter

    class Formatter(RawDescriptionRichHelpFormatter):
        """Coloured help in which [brackets] of a docstring are text, not markup."""

        text_markup = False
        help_markup = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.console = console()  # no styles at all where colour is off; rich would keep bold

    return Formatter
