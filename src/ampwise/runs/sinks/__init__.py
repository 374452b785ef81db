"""Sinks: send a run's metrics to TensorBoard, W&B, MLflow, trackio, JSON lines, or a function.

Each kind of sink is a module of ``ampwise.runs.sinks.kinds``, found by its file name. It defines

    PACKAGE                  name of the package it needs, as imported; None if it needs none
    open_sink(about)         context manager that yields a function that sends rows
    load()                   import what open_sink needs; optional
    check(about)             return why it cannot be opened, as far as that is known beforehand; optional
    SUFFIX                   suffix of the path it writes to, if it writes files

Opening, sending and closing run in the sink's own thread (``delivery``): they may be slow or fail without affecting the
training. Loading runs in the script's thread before the first step, because a process forked while another thread
imports may wait for that import forever.

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
from ampwise.finding.package_modules import module_names
from ampwise.runs.sinks import kinds

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint
    from pathlib import Path
    from types import ModuleType

    from ampwise.runs.sinks.metrics import MetricsRow
    from ampwise.runs.sinks.sink_context import Send, SinkContext

    OpenSink = Callable[[SinkContext], AbstractContextManager[Send]]

__all__ = ["SinkRequest", "SinkSyntax", "built_in_kinds", "requested_sinks"]

GROUP = "ampwise.sinks"


class SinkSyntax:
    """How the user names sinks (``--sink NAME`` or ``sinks=[...]``), for error messages."""

    __slots__ = ("_each", "_quoted", "_template")

    def __init__(self, template: str, *, quoted: bool, each: str) -> None:
        self._template, self._quoted, self._each = template, quoted, each

    def of(self, asked: object) -> str:
        plain = isinstance(asked, str) and asked and not self._quoted
        return self._template.format(asked if plain else repr(asked))

    def error(self, asked: object, what: str) -> BadInput:
        return BadInput(f"{self.of(asked)}: {what}")

    def several(self, asked: str) -> BadInput:
        return self.error(asked, f"this is more than one sink: {self._each}.")


COMMAND_LINE_SYNTAX = SinkSyntax("--sink {}", quoted=False, each="give --sink once for each")


class SinkRequest:
    """A sink that was requested and is available; it is created by ``open``.

    at_a_time: most rows that it is sent at once; None for any number.
    """

    __slots__ = ("_load", "about", "at_a_time", "label", "open_sink")

    def __init__(
        self,
        label: str,
        open_sink: OpenSink,
        about: SinkContext,
        *,
        load: Callable[[], None] | None = None,
        at_a_time: int | None = None,
    ) -> None:
        self.label, self.open_sink, self.about, self.at_a_time = label, open_sink, about, at_a_time
        self._load = load

    def load(self) -> None:
        """Import what ``open`` needs, in the calling thread; this may take a second."""
        if self._load is not None:
            from ampwise.runs.sinks.separate_random import random_state_kept

            with (
                random_state_kept(),
                suppress(Exception),
            ):  # a broken package fails again in open(), where it is reported
                self._load()

    def open(self) -> AbstractContextManager[Send]:
        return self.open_sink(self.about)


def built_in_kinds() -> list[str]:
    """Return the kinds that come with ampwise, by scanning the folder.

    >>> built_in_kinds()
    ['jsonl', 'mlflow', 'tensorboard', 'trackio', 'wandb']
    """
    return module_names(kinds.__path__)


def requested_sinks(
    asked: Iterable[str | Callable[[MetricsRow], None]],
    *,
    base: Path,
    asking: SinkSyntax = COMMAND_LINE_SYNTAX,
    sends: bool = True,
) -> list[SinkRequest]:
    """Return the requested sinks, given as names (with a target after a colon) or functions.

    Raise BadInput, MissingDependency or UnknownName if one is not available. base: path of the run; sinks without a
    target write next to it. sends: whether this process sends; if not, the process that does checks the targets.
    """
    found: dict[object, SinkRequest] = {}  # a sink named twice is opened once
    for each in asked:
        key, opening = _opening(each, base.absolute(), asking, sends)
        found.setdefault(key, opening)
    if found:
        from ampwise.runs.sinks.wait_limits import wait_limits

        wait_limits()  # raises now if the variable is not a number
    return list(found.values())


def _opening(asked: object, base: Path, asking: SinkSyntax, sends: bool) -> tuple[object, SinkRequest]:
    """Return a key that is the same for two names of the same sink, and the sink."""
    from ampwise.runs.sinks.sink_context import SinkContext

    if callable(asked):
        label = str(getattr(asked, "__qualname__", type(asked).__name__))
        return id(asked), SinkRequest(label, _function_opener(asked), SinkContext(base=base), at_a_time=1)
    name, target = _name_and_target(asked, asking)
    about = SinkContext(base=base, target=target)
    if name not in built_in_kinds():
        return (name, target), SinkRequest(name, _plugin_opener(name, asking), about)
    kind = importlib.import_module(f"{kinds.__name__}.{name}")
    _check(kind, name, about, asking, sends)
    suffix = getattr(kind, "SUFFIX", None)
    place = target if suffix is None else about.path(suffix).resolve()
    return (name, place), SinkRequest(name, kind.open_sink, about, load=getattr(kind, "load", None))


def _name_and_target(asked: object, asking: SinkSyntax) -> tuple[str, str | None]:
    if not isinstance(asked, str):
        raise asking.error(asked, "expected the name of a sink, or a function that takes a row.")
    name, colon, target = asked.partition(":")
    if not name:
        raise asking.error(
            asked, f"expected the name of a sink{' before the colon' if colon else ''}: {_kinds_text()}."
        )
    if colon and not target:
        raise asking.error(
            asked, "expected a target after the colon. Without the colon, the sink uses its default target."
        )
    first, comma, _ = asked.partition(",")
    if (
        comma
        and first.partition(":")[0] in built_in_kinds()
        and asked.rpartition(",")[2].partition(":")[0] in (built_in_kinds())
    ):
        raise asking.several(asked)
    return name, target or None


def _check(kind: ModuleType, name: str, about: SinkContext, asking: SinkSyntax, sends: bool) -> None:
    package: str | None = kind.PACKAGE
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{asking.of(name)}: {package} is not installed. pip install 'ampwise[{name}]'")
    why = kind.check(about) if sends and hasattr(kind, "check") else None
    if why is not None:
        raise asking.error(f"{name}:{about.target}" if about.target else name, f"{why}.")


def _kinds_text() -> str:
    return ", ".join(sorted({*built_in_kinds(), *_plugins()}))


def _plugin_opener(name: str, asking: SinkSyntax) -> OpenSink:
    from ampwise.runs.sinks.separate_random import random_state_kept

    plugins = _plugins()
    if name not in plugins:
        unknown = UnknownName("sink", name, {*built_in_kinds(), *plugins}, listing=f"The sinks are {_kinds_text()}.")
        unknown.args = (f"{asking.of(name)}: {unknown}",)
        raise unknown
    try:
        with random_state_kept():
            found: OpenSink = plugins[name].load()
    except Exception as error:  # third-party code may raise anything
        what = f"{plugins[name].value} cannot be loaded: {type(error).__name__}: {error}"
        raise asking.error(name, what) from error
    return found


def _plugins() -> dict[str, EntryPoint]:
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _function_opener(function: Callable[[MetricsRow], None]) -> OpenSink:
    @contextmanager
    def open_sink(about: SinkContext) -> Iterator[Send]:
        def send(rows: Sequence[MetricsRow]) -> None:
            for row in rows:
                function(row)

        yield send

    return open_sink
