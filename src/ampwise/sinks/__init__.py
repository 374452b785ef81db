"""Where the numbers of a run go besides its record: TensorBoard, W&B, MLflow, trackio, JSON lines, or a function.

Every kind is a module of ``ampwise.sinks.kinds``; the list of kinds is the list of files. It has

    PACKAGE                  what must be installed, as it is imported; None for nothing
    open_sink(about)         a context manager that yields a function of rows
    load()                   imports what that takes; optional
    check(about)             why it cannot be opened, in words, as far as is known before; optional
    SUFFIX                   of the path that it writes to; only where it does

Opening, sending and closing happen in a thread of the sink's own (``delivery``), so that all of them may take their
time, and may fail: the training goes on. Loading happens in the script's thread, before the first step: a process that
is forked while another thread imports may wait for that import for ever.

Other packages add kinds through the entry-point group ``ampwise.sinks``, whose entries name an ``open_sink``::

    [project.entry-points."ampwise.sinks"]
    statsd = "my_package.statsd:open_sink"
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.modules import module_names
from ampwise.sinks import kinds

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint
    from pathlib import Path
    from types import ModuleType

    from ampwise.sinks.about import About, Send
    from ampwise.sinks.metrics import Row

    OpenSink = Callable[[About], AbstractContextManager[Send]]

__all__ = ["Asking", "Opening", "built_in_kinds", "openings"]

GROUP = "ampwise.sinks"


class Asking:
    """How the user names sinks: in the words of errors."""

    __slots__ = ("_each", "_quoted", "_words")

    def __init__(self, words: str, *, quoted: bool, each: str) -> None:
        self._words, self._quoted, self._each = words, quoted, each

    def of(self, asked: object) -> str:
        plain = isinstance(asked, str) and asked and not self._quoted
        return self._words.format(asked if plain else repr(asked))

    def error(self, asked: object, what: str) -> BadInput:
        return BadInput(f"{self.of(asked)}: {what}")

    def several(self, asked: str) -> BadInput:
        return self.error(asked, f"this is more than one sink: {self._each}.")


ON_THE_COMMAND_LINE = Asking("--sink {}", quoted=False, each="give --sink once for each")


class Opening:
    """A sink that was asked for and can be had; nothing of it is made before ``open``.

    at_a_time: how many rows it is sent at most, None for any number.
    """

    __slots__ = ("_load", "about", "at_a_time", "label", "open_sink")

    def __init__(
        self,
        label: str,
        open_sink: OpenSink,
        about: About,
        *,
        load: Callable[[], None] | None = None,
        at_a_time: int | None = None,
    ) -> None:
        self.label, self.open_sink, self.about, self.at_a_time = label, open_sink, about, at_a_time
        self._load = load

    def load(self) -> None:
        """Import what ``open`` will need, which may take a second, in the thread that asks."""
        if self._load is not None:
            from ampwise.sinks.apart import without_drawing

            with without_drawing(), suppress(Exception):  # a broken package: opening it will tell
                self._load()

    def open(self) -> AbstractContextManager[Send]:
        return self.open_sink(self.about)


def built_in_kinds() -> list[str]:
    """The kinds that come with ampwise, by scanning the folder.

    >>> built_in_kinds()
    ['jsonl', 'mlflow', 'tensorboard', 'trackio', 'wandb']
    """
    return module_names(kinds.__path__)


def openings(
    asked: Iterable[str | Callable[[Row], None]],
    *,
    base: Path,
    asking: Asking = ON_THE_COMMAND_LINE,
    sends: bool = True,
) -> list[Opening]:
    """The sinks behind names, each with its target after a colon, and functions; or an error that says what is wrong.

    base: the run, as a path; what has no target is written beside it. sends: whether it is this process that sends;
    if it is another, on another machine maybe, that one looks at the targets.
    """
    found: dict[object, Opening] = {}  # one that was named twice is one
    for each in asked:
        key, opening = _opening(each, base.absolute(), asking, sends)
        found.setdefault(key, opening)
    if found:
        from ampwise.sinks.patience import patience

        patience()  # refused now, if it is no number
    return list(found.values())


def _opening(asked: object, base: Path, asking: Asking, sends: bool) -> tuple[object, Opening]:
    """With what two ways of naming the same sink have in common."""
    from ampwise.sinks.about import About

    if callable(asked):
        label = str(getattr(asked, "__qualname__", type(asked).__name__))
        return id(asked), Opening(label, _of_function(asked), About(base=base), at_a_time=1)
    name, target = _name_and_target(asked, asking)
    about = About(base=base, target=target)
    if name not in built_in_kinds():
        return (name, target), Opening(name, _of_plugin(name, asking), about)
    kind = importlib.import_module(f"{kinds.__name__}.{name}")
    _check(kind, name, about, asking, sends)
    suffix = getattr(kind, "SUFFIX", None)
    place = target if suffix is None else about.path(suffix).resolve()
    return (name, place), Opening(name, kind.open_sink, about, load=getattr(kind, "load", None))


def _name_and_target(asked: object, asking: Asking) -> tuple[str, str | None]:
    if not isinstance(asked, str):
        raise asking.error(asked, "a sink's name is expected, or a function that takes a row.")
    name, colon, target = asked.partition(":")
    if not name:
        raise asking.error(asked, f"a sink's name is expected{' before the colon' if colon else ''}: {_listed()}.")
    if colon and not target:
        raise asking.error(asked, "nothing follows the colon. Without it, the sink has a place of its own.")
    first, comma, _ = asked.partition(",")
    if (
        comma
        and first.partition(":")[0] in built_in_kinds()
        and asked.rpartition(",")[2].partition(":")[0] in (built_in_kinds())
    ):
        raise asking.several(asked)
    return name, target or None


def _check(kind: ModuleType, name: str, about: About, asking: Asking, sends: bool) -> None:
    package: str | None = kind.PACKAGE
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{asking.of(name)}: {package} is not installed. pip install 'ampwise[{name}]'")
    why = kind.check(about) if sends and hasattr(kind, "check") else None
    if why is not None:
        raise asking.error(f"{name}:{about.target}" if about.target else name, f"{why}.")


def _listed() -> str:
    return ", ".join(sorted({*built_in_kinds(), *_plugins()}))


def _of_plugin(name: str, asking: Asking) -> OpenSink:
    from ampwise.sinks.apart import without_drawing

    plugins = _plugins()
    if name not in plugins:
        unknown = UnknownName("sink", name, {*built_in_kinds(), *plugins}, listing=f"The sinks are {_listed()}.")
        unknown.args = (f"{asking.of(name)}: {unknown}",)
        raise unknown
    try:
        with without_drawing():
            found: OpenSink = plugins[name].load()
    except Exception as error:  # a stranger's module: anything may come out of it
        what = f"{plugins[name].value} cannot be loaded: {type(error).__name__}: {error}"
        raise asking.error(name, what) from error
    return found


def _plugins() -> dict[str, EntryPoint]:
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _of_function(function: Callable[[Row], None]) -> OpenSink:
    @contextmanager
    def open_sink(about: About) -> Iterator[Send]:
        def send(rows: Sequence[Row]) -> None:
            for row in rows:
                function(row)

        yield send

    return open_sink
