"""Where the numbers of a run go besides its record: TensorBoard, W&B, MLflow, trackio, JSON lines, or a function.

Every kind is a module of ``ampwise.sinks.kinds``; the list of kinds is the list of files. It has

    PACKAGE                  what must be installed, as it is imported; None for nothing
    open_sink(about)         a context manager that yields a function of rows

Opening, sending and closing happen in a thread of the sink's own (``delivery``), so that all of them may take their
time, and may fail: the training goes on. Other packages add kinds through the entry-point group ``ampwise.sinks``,
whose entries name an ``open_sink``::

    [project.entry-points."ampwise.sinks"]
    statsd = "my_package.statsd:open_sink"
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import contextmanager

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.modules import module_names
from ampwise.sinks import kinds

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint
    from pathlib import Path

    from ampwise.sinks.about import About, Send
    from ampwise.sinks.metrics import Row

    OpenSink = Callable[[About], AbstractContextManager[Send]]

__all__ = ["Opening", "built_in_kinds", "openings"]

GROUP = "ampwise.sinks"


class Opening:
    """A sink that was asked for and can be had; nothing of it is loaded or made before ``open``."""

    __slots__ = ("about", "label", "open_sink")

    def __init__(self, label: str, open_sink: OpenSink, about: About) -> None:
        self.label, self.open_sink, self.about = label, open_sink, about

    def open(self) -> AbstractContextManager[Send]:
        return self.open_sink(self.about)


def built_in_kinds() -> list[str]:
    """The kinds that come with ampwise, by scanning the folder.

    >>> built_in_kinds()
    ['jsonl', 'mlflow', 'tensorboard', 'trackio', 'wandb']
    """
    return module_names(kinds.__path__)


def openings(asked: Iterable[str | Callable[[Row], None]], *, base: Path, prefix: str = "--sink {}") -> list[Opening]:
    """The sinks behind names, each with its target after a colon, and functions; or an error that says what is wrong.

    base: the run, as a path; what has no target is written beside it. prefix: how the user wrote it.
    """
    return [_opening(each, base, prefix) for each in dict.fromkeys(asked)]  # one that was named twice is one


def _opening(asked: str | Callable[[Row], None], base: Path, prefix: str) -> Opening:
    from ampwise.sinks.about import About

    if callable(asked):
        label = str(getattr(asked, "__qualname__", type(asked).__name__))
        return Opening(label, _of_function(asked), About(base=base.absolute()))
    if not isinstance(asked, str) or not asked:
        raise BadInput(f"{prefix.format(repr(asked))}: a sink's name is expected, or a function that takes a row.")
    name, colon, target = asked.partition(":")
    if colon and not target:
        raise BadInput(
            f"{prefix.format(asked)}: nothing follows the colon. Without it, the sink has a place of its own."
        )
    return Opening(name, _open_sink(name, prefix.format(name)), About(base=base.absolute(), target=target or None))


def _open_sink(name: str, asked: str) -> OpenSink:
    if name not in built_in_kinds():
        return _of_plugin(name, asked)
    module = importlib.import_module(f"{kinds.__name__}.{name}")
    package: str | None = module.PACKAGE
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{asked}: {package} is not installed. pip install 'ampwise[{name}]'")
    found: OpenSink = module.open_sink
    return found


def _of_plugin(name: str, asked: str) -> OpenSink:
    plugins = _plugins()
    if name not in plugins:
        known = sorted({*built_in_kinds(), *plugins})
        raise UnknownName("sink", name, known, listing=f"The sinks are {', '.join(known)}.")
    try:
        found: OpenSink = plugins[name].load()
    except Exception as error:  # a stranger's module: anything may come out of it
        raise BadInput(f"{asked}: {plugins[name].value} cannot be loaded: {type(error).__name__}: {error}") from error
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
