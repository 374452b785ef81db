"""Run a script as Python would: with its own argv, ``__main__``, search path, exceptions and exit code."""

from __future__ import annotations

import builtins
import importlib.util
import io
import sys
import tokenize
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable, say
from ampwise.watch.patches import INTERNAL

__all__ = ["ScriptExit", "ScriptToRun", "is_launcher", "launch", "when_imported"]

PYTHONS = ("python", "python3")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
INTERRUPTED = 130  # 128 + SIGINT, as in a shell


@dataclass(frozen=True, slots=True)
class ScriptExit:
    """The end of a script: status, exit code and error."""

    status: str  # "finished", "failed", "interrupted"
    exit_code: int
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ScriptToRun:
    """A script to run: a file, or a module by its name."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem

    def check(self) -> None:
        """Raise BadInput if the script cannot be run."""
        if self.is_module:
            return
        path = Path(self.name)
        if path.name in PYTHONS and not path.is_file():
            raise BadInput(f"leave out {self.name!r}: use ampwise run {' '.join(self.args[:1]) or 'train.py'} …")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise BadInput(f"{self.name} is a folder without __main__.py. Give the path of a script.")
        if not path.exists():
            raise BadInput(f"{self.name}: no such file. For a module: ampwise run -m {self.stem}.")
        try:
            _read_source(path / "__main__.py" if path.is_dir() else path)
        except SyntaxError as error:
            raise BadInput(f"{error.msg}. Give the path of a script.") from None

    def run(self) -> ScriptExit:
        """Run the script in this process, and return how it ended. Exceptions are shown as Python would show them."""
        try:
            code, attributes, first_path = self._load_module() if self.is_module else self._load_file()
            main = ModuleType("__main__")
            vars(main).update({"__builtins__": builtins, **attributes})
            sys.argv = [str(attributes["__file__"]) if self.is_module else self.name, *self.args]
            sys.path[0] = first_path
            sys.modules["__main__"] = main
            exec(code, vars(main))
        except SystemExit as leaving:
            return ScriptExit("finished", _exit_code(leaving.code))
        except KeyboardInterrupt as error:
            _show_traceback(error)
            return ScriptExit("interrupted", INTERRUPTED, error)
        except BaseException as error:
            _show_traceback(error)
            return ScriptExit("failed", 1, error)
        return ScriptExit("finished", 0)

    def _load_file(self) -> tuple[CodeType, dict[str, Any], str]:
        """Return code, attributes of ``__main__``, and the first entry of the search path."""
        path = Path(self.name).absolute()
        folder = path if path.is_dir() else path.resolve().parent  # a link is resolved, as in Python
        path = path / "__main__.py" if path.is_dir() else path
        data = _read_source(path)
        # Unchanged, and with its own name: tracebacks and pickles are then those of a plain run.
        code = compile(data, str(path), "exec", dont_inherit=True)
        return code, {"__file__": str(path), "__spec__": None}, str(folder)

    def _load_module(self) -> tuple[CodeType, dict[str, Any], str]:
        sys.path[0] = str(Path.cwd())
        spec = _find_spec(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find_spec(f"{self.name}.__main__")
        if spec is None or spec.loader is None:
            raise ImportError(printable(f"No module named {self.name}, or it cannot be run."))
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        attributes = {
            "__file__": spec.origin,
            "__spec__": spec,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__cached__": spec.cached,
        }
        return code, attributes, str(Path.cwd())


def _read_source(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        raise SyntaxError(printable(f"{path} is not Python source: it is not UTF-8 text")) from None
    except LookupError as error:
        raise SyntaxError(printable(f"{path}: {error}")) from None
    return data


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _exit_code(code: Any) -> int:
    """Return the exit code of ``sys.exit(code)``; what is not a number is printed, as Python does."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if code.bit_length() < 64 else 0xFF  # as in C
    words = ""
    with suppress(Exception):
        words = str(code)
    with suppress(Exception):  # the stream may be closed, or None
        sys.stderr.write(f"{words}\n")
    return 1


def _show_traceback(error: BaseException) -> None:
    """Print the traceback without the frames of this file and of wrappers around torch's functions."""
    seen: BaseException | None = error
    while seen is not None:
        frames, trace = [], seen.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename not in (__file__, INTERNAL):
                frames.append(trace)
            trace = trace.tb_next
        for each in reversed(frames):
            line = each.tb_lineno or each.tb_frame.f_code.co_firstlineno  # None in code without lines of its own
            trace = TracebackType(trace, each.tb_frame, each.tb_lasti, line)
        seen.__traceback__ = trace
        seen = seen.__cause__ or seen.__context__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # the script's own hook is broken
        traceback.print_exception(error)


# torchrun


def is_launcher(script: ScriptToRun) -> bool:
    """Whether the script is torchrun."""
    return script.name in LAUNCHERS if script.is_module else Path(script.name).name == "torchrun"


def launch(script: ScriptToRun, folder: Path, options: list[str]) -> ScriptExit:
    """Start the processes as torchrun would, each of them watched, with its own part of the record."""
    from torch.distributed import run as torchrun

    args = torchrun.get_args_parser().parse_args(list(script.args))
    if args.no_python:
        say("ampwise: warning: processes that torchrun --no-python starts are not watched")
    else:
        words = ["run", "--part", "-o", str(folder), *options, *(["-m"] if args.module else [])]
        args.training_script_args = [*words, args.training_script, *args.training_script_args]
        args.module, args.training_script = True, "ampwise"
    try:
        torchrun.run(args)
        return ScriptExit("finished", 0)
    except KeyboardInterrupt:
        return ScriptExit("interrupted", INTERRUPTED)
    except SystemExit as leaving:
        return ScriptExit("finished", leaving.code if isinstance(leaving.code, int) else 1)
    except Exception as error:  # a process failed, or a signal came; torchrun has printed which
        return ScriptExit("failed", 1, error)


# The import of torch


class _Finder(MetaPathFinder):
    """Finder of one module, which calls back after the import."""

    def __init__(self, name: str, on_import: Callable[[], None]) -> None:
        self._name, self._on_import = name, on_import

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this function
            loader.exec_module(module)
            self._on_import()

        if loader is not None:
            loader.exec_module = exec_module
        return spec


def when_imported(name: str, on_import: Callable[[], None]) -> None:
    """Call back once the module has been imported, or now if it already has been.

    The watch must not import torch itself: a script may first set environment variables that torch reads on import.
    """
    if name in sys.modules:
        on_import()
    else:
        sys.meta_path.insert(0, _Finder(name, on_import))
