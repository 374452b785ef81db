"""The command line: one module per command.

A command is a module of this package with a docstring (its help; the first line is its line in ``ampwise --help``), a
``GROUP`` to be listed in, ``add_arguments(parser)`` and ``run(args)``, which returns the exit code: 0 clean, 1
findings, 2 error. The modules in this folder are the list of commands. Commands import what they need inside ``run``,
so that ``ampwise explain`` never pays for torch; one that cannot do without it sets ``NEEDS_TORCH``. Arguments that
several commands have are in ``_arguments``; they are checked here, before torch is imported.
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

from ampwise.cli._arguments import check_shared
from ampwise.errors import AmpwiseError, BadInput, MissingDependency, UnknownName, nearest
from ampwise.finding.package_modules import module_names
from ampwise.finding.terminal import OutputError, console, flush, output_errors, paint, say, wants_colour, write

if TYPE_CHECKING:
    from typing import NoReturn

DESCRIPTION = "Find and fix mixed-precision bugs in PyTorch training."
START = {
    "ampwise check train.py": "find mistakes, without running the script",
    "ampwise run train.py": "train as usual, and watch for trouble",
    "ampwise report": "show what the newest run found",
}
# The order of groups and of commands in them; a command that is not named here comes after those of its group.
ORDER = (
    *("check", "run", "watch", "report", "replay", "explain"),
    *("advise", "bench", "memory", "align", "diff", "search"),
    *("formats", "gpu", "schema", "checkpoints", "mcp", "skill", "init", "completion"),
)
# What people type, by habit from other tools or from an earlier version, and what it is here.
INSTEAD = {
    "compare": "bench",
    "resume": "checkpoints",
    "rules": "explain",
    "lint": "check",
    "fix": "check --fix",
    "runs": "report",
    "version": "--version",
    "--out": "--output",
    "--html": "--output",
    "--build": "MAKE",
}

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


def overview(colour: bool = False) -> str:
    """Return the help of the program: three commands to start with, then all by group, a line each."""
    groups: dict[str, list[str]] = {}
    for name in sorted(commands(), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        module = importlib.import_module(f"{__name__}.{name}")
        groups.setdefault(getattr(module, "GROUP", "Other"), []).append(name)
    said = summaries()
    lines = [DESCRIPTION, "", *(f"  {line:24}{what}" for line, what in START.items())]
    for group, names in groups.items():
        lines += ["", paint(group, "bold", colour), *(f"  {name:13}{said[name]}" for name in names)]
    lines += ["", "`ampwise help COMMAND` explains one, with examples; `-V` shows the version.", ""]
    return "\n".join(lines)


def build_parser(words: Sequence[str] = ()) -> _CommandParser:
    """Build the parser for a command line; only the module of the command that it names is loaded."""
    parser = _CommandParser(prog="ampwise")
    parser.add_argument("-V", "--version", action=_Version)
    leading = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    if len(leading) == len(words):
        parser.format_help = lambda: overview(wants_colour(sys.stdout))  # type: ignore[method-assign]
        return parser
    name, known = words[len(leading)], commands()
    parser.refuse_command_options(leading, name if name in known else "COMMAND")
    if name not in known:
        if name == "trace":
            raise BadInput(
                "unknown command 'trace'. `ampwise run train.py` traces NaN in a script to its line; in Python, "
                "`ampwise.trace(loss_fn, x, y)` traces one step; `ampwise replay` runs a saved one again."
            )
        if name in INSTEAD:
            raise BadInput(f"unknown command {name!r}. Did you mean `ampwise {INSTEAD[name]}`?")
        raise UnknownName("command", name, known, listing="`ampwise --help` lists the commands.")
    command = importlib.import_module(f"{__name__}.{name}")
    subparser = parser.add_subparsers(parser_class=_CommandParser).add_parser(
        name, description=(command.__doc__ or "").strip()
    )
    command.add_arguments(subparser)
    subparser.set_defaults(command=command, parser=subparser)
    parser.command = subparser
    return parser


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:  # `ampwise help check` is `ampwise check --help`
        words = [*words[1:2], "--help"]
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
        args.words = words
        check_shared(args)
        try:
            return int(args.command.run(args))
        except ImportError as error:
            if getattr(args.command, "NEEDS_TORCH", False) and sys.modules.get("torch") is None:
                raise MissingDependency(f"{args.parser.prog} needs torch: pip install 'ampwise[torch]'") from error
            raise
    finally:
        if flushes:  # not at exit, where a closed pipe would print a traceback
            flush(sys.stdout)


def print_json(value: Any) -> None:
    """Print strict JSON on stdout: an object with the version of its schema (see cli/_schemas), or an array."""
    from ampwise.finding.strict_json import SCHEMA_VERSION, dumps

    write(dumps({"version": SCHEMA_VERSION, **value} if isinstance(value, dict) else value), sys.stdout)


def _drop_stdout() -> None:
    """Send unwritten output to the null device, or Python reports the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _CommandParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line that names the help, and which takes no abbreviated options."""

    command: _CommandParser  # of the command that was named

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous after the next option is added.
        # Nothing is printed with this formatter; without a width it would import shutil to find one.
        plain = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
        super().__init__(**{"formatter_class": plain, "allow_abbrev": False, **options})

    def format_help(self) -> str:
        # Set here: argparse makes a formatter for each argument that is added, and this one imports rich.
        self.formatter_class = _formatter()
        self.description = _wrapped(self.description or "")
        with output_errors():  # rich touches the stream before anything is written
            return super().format_help()

    def error(self, message: str) -> NoReturn:
        message = message.removesuffix(", ARGS")  # those of a script: argparse wants them listed, but there may be none
        if message.endswith("required: MAKE"):
            message = "name your function that makes the model and a batch, MAKE; `ampwise init train.py` writes one"
        stop = "" if message.endswith((".", "?")) else "."
        say("ampwise: error: {}{} See `{} --help`.", message, stop, self.prog)
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors when it writes help.
        write(message, sys.stderr if file is None else file)

    def refuse_command_options(self, leading: Sequence[str], command: str) -> None:
        """Refuse `ampwise --json formats`: options of a command come after it."""
        for option in (word.partition("=")[0] for word in leading):
            if option != "--" and option not in self._option_string_actions:
                self.error(f"unknown option {option!r}; options come after the command: `ampwise {command} {option}`")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first unknown word only; argparse would list all words after it, too."""
        word = unknown[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        option = word.partition("=")[0]
        names = [*self._option_string_actions, *(str(action.metavar) for action in self._get_positional_actions())]
        close = [INSTEAD[option]] if INSTEAD.get(option) in names else []
        if option.startswith("--") and option not in INSTEAD:
            close = [f"--{name}" for name in nearest(option[2:], (name[2:] for name in names if name.startswith("--")))]
        if not close and "SCRIPT" in names:
            self.error(f"unknown option {option!r}; options of the script come after the script")
        self.error(f"unknown option {option!r}" + (f"; did you mean {' or '.join(close)}?" if close else ""))


class _Version(argparse.Action):
    """--version, looked up only on demand: reading package metadata is slower than most commands."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ampwise.finding.version import installed_version

        say("ampwise {}", installed_version() or "(a source folder, not installed)", stream=sys.stdout)
        parser.exit()


def _wrapped(text: str) -> str:
    """Wrap paragraphs at the width of the terminal; indented lines, which are examples and tables, stay as they are."""
    import shutil
    import textwrap

    width = max(shutil.get_terminal_size().columns - 2, 40)  # as argparse has it for options
    lines: list[str] = []
    for is_prose, group in itertools.groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
        if is_prose:
            lines += textwrap.wrap(" ".join(group), width, break_long_words=False, break_on_hyphens=False)
        else:
            lines += group
    return "\n".join(lines)


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
