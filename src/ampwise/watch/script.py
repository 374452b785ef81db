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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.watch.patches import INTERNAL

__all__ = ["ScriptExit", "ScriptToRun", "when_imported"]

PYTHONS = ("python", "python3")
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

    def run(self) -> ScriptExit:
        """Run the script in this process, and return how it ended. Exceptions are shown as Python would show them."""
        try:
            code, attributes, first_path = self._module() if self.is_module else self._file()
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

    def _file(self) -> tuple[CodeType, dict[str, Any], str]:
        path = Path(self.name).absolute()
        if path.is_dir():
            return _compiled(path / "__main__.py"), {"__file__": str(path / "__main__.py"), "__spec__": None}, str(path)
        # A link is resolved for the search path, as in Python.
        return _compiled(path), {"__file__": str(path), "__spec__": None}, str(path.resolve().parent)

    def _module(self) -> tuple[CodeType, dict[str, Any], str]:
        sys.path[0] = str(Path.cwd())
        spec = _spec_of(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _spec_of(f"{self.name}.__main__")
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


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _compiled(path: Path) -> CodeType:
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        raise SyntaxError(printable(f"{path} is not Python source: it is not UTF-8 text")) from None
    except LookupError as error:
        raise SyntaxError(printable(f"{path}: {error}")) from None
    # Unchanged, and with its own name: tracebacks and pickles are then those of a plain run.
    return compile(data, str(path), "exec", dont_inherit=True)


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if code.bit_length() < 64 else 0xFF  # as in C
    words = ""
    with suppress(Exception):
        words = str(code)
    stream = sys.stderr
    with suppress(Exception):  # it may be closed, or None
        stream.write(f"{words}\n")
    return 1


def _show_traceback(error: BaseException) -> None:
    """Print the traceback, starting at the script's first frame."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _without_ours(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # the script's own hook is broken
        traceback.print_exception(error)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this file and of wrappers around torch's functions from a traceback."""
    frames = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in (__file__, INTERNAL):
            frames.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for each in reversed(frames):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


class _NotifyingLoader(Loader):
    """Loader that wraps a module's own loader, and calls back after the import."""

    def __init__(self, loader: Any, on_import: Callable[[], None]) -> None:
        self._loader, self._on_import = loader, on_import

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._on_import()


class _NotifyingFinder(MetaPathFinder):
    def __init__(self, name: str, on_import: Callable[[], None]) -> None:
        self._name, self._on_import = name, on_import

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self._on_import)
        return spec


def when_imported(name: str, on_import: Callable[[], None]) -> None:
    """Call back once the module has been imported, or now if it already has been.

    The watch must not import torch itself: a script may first set environment variables that torch reads on import.
    """
    if name in sys.modules:
        on_import()
    else:
        sys.meta_path.insert(0, _NotifyingFinder(name, on_import))
