"""A script run as Python would run it: its own argv, ``__main__``, search path, exceptions and exit code."""

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
from ampwise.printers.terminal import printable
from ampwise.watch.patches import INTERNAL

__all__ = ["Ended", "Script", "when_imported"]

PYTHONS = ("python", "python3")
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended."""

    status: str  # "finished", "failed", "interrupted"
    exit_code: int
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """What is to be run: a file, or a module by its name."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem

    def check(self) -> None:
        """Refuse, before anything is done, what cannot be run."""
        if self.is_module:
            return
        path = Path(self.name)
        if path.name in PYTHONS and not path.is_file():
            raise BadInput(f"leave out {self.name!r}: ampwise run {' '.join(self.args[:1]) or 'train.py'} …")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise BadInput(f"{self.name} is a folder without __main__.py. Name the script in it.")
        if not path.exists():
            raise BadInput(f"{self.name}: no such file. For a module: ampwise run -m {self.stem}.")

    def run(self) -> Ended:
        """Run it in this process, and say how it ended. What it raises is shown as Python would show it."""
        try:
            code, facts, first_path = self._module() if self.is_module else self._file()
            main = ModuleType("__main__")
            vars(main).update({"__builtins__": builtins, **facts})
            sys.argv = [str(facts["__file__"]) if self.is_module else self.name, *self.args]
            sys.path[0] = first_path
            sys.modules["__main__"] = main
            exec(code, vars(main))
        except SystemExit as leaving:
            return Ended("finished", _exit_code(leaving.code))
        except KeyboardInterrupt as error:
            _show(error)
            return Ended("interrupted", INTERRUPTED, error)
        except BaseException as error:
            _show(error)
            return Ended("failed", 1, error)
        return Ended("finished", 0)

    def _file(self) -> tuple[CodeType, dict[str, Any], str]:
        path = Path(self.name).absolute()
        if path.is_dir():
            return _compiled(path / "__main__.py"), {"__file__": str(path / "__main__.py"), "__spec__": None}, str(path)
        # A link's neighbours are those of what it links to, as Python has it.
        return _compiled(path), {"__file__": str(path), "__spec__": None}, str(path.resolve().parent)

    def _module(self) -> tuple[CodeType, dict[str, Any], str]:
        sys.path[0] = str(Path.cwd())
        spec = _spec_of(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _spec_of(f"{self.name}.__main__")
        if spec is None or spec.loader is None:
            raise ImportError(printable(f"No module named {self.name}, or none that can be run."))
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        facts = {
            "__file__": spec.origin,
            "__spec__": spec,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__cached__": spec.cached,
        }
        return code, facts, str(Path.cwd())


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
        raise SyntaxError(printable(f"{path} is not Python: it is not text in UTF-8")) from None
    except LookupError as error:
        raise SyntaxError(printable(f"{path}: {error}")) from None
    # As it stands, with its name as it was given: tracebacks and pickles are then those of a plain run.
    return compile(data, str(path), "exec", dont_inherit=True)


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if code.bit_length() < 64 else 0xFF  # as C has it
    words = ""
    with suppress(Exception):
        words = str(code)
    stream = sys.stderr
    with suppress(Exception):  # it may be closed, or None
        stream.write(f"{words}\n")
    return 1


def _show(error: BaseException) -> None:
    """The traceback, from the script's own first line on."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _without_ours(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # a hook of the script's that is broken itself
        traceback.print_exception(error)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this file and of wrappers around torch's functions."""
    frames = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in (__file__, INTERNAL):
            frames.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for each in reversed(frames):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


class _Telling(Loader):
    """Loads a module as its own loader would, and then tells."""

    def __init__(self, loader: Any, tell: Callable[[], None]) -> None:
        self._loader, self._tell = loader, tell

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._tell()


class _Finder(MetaPathFinder):
    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self._name, self._tell = name, tell

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._tell)
        return spec


def when_imported(name: str, tell: Callable[[], None]) -> None:
    """Call once the module has been imported, or now if it has.

    Importing torch ourselves would come too early: a script may set variables first that torch reads only then.
    """
    if name in sys.modules:
        tell()
    else:
        sys.meta_path.insert(0, _Finder(name, tell))
