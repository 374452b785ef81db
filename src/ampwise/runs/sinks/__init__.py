"""Sinks: send a run's metrics to TensorBoard, W&B, MLflow, trackio, JSON lines, or a function.

Each kind of sink is a module of ``ampwise.runs.sinks.kinds``, found by its file name. It defines

    PACKAGE                  name of the package it needs, as imported; None if it needs none
    open_sink(about)         context manager that yields a function that sends rows
    load()                   import what open_sink needs; optional
    check(about)             return why it cannot be opened, as far as that is known beforehand; optional
    SUFFIX                   suffix of the path it writes to, if it writes files

Opening, sending and closing run in the sink's own thread (``run_sinks``): they may be slow or fail without affecting
the training. Loading runs in the script's thread before the first step, because a process forked while another thread
imports may wait for that import forever.

Other packages add kinds through the entry-point group ``ampwise.sinks``, whose entries name an ``open_sink``::

    [project.entry-points."ampwise.sinks"]
    statsd = "my_package.statsd:open_sink"
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.finding.package_modules import module_names
from ampwise.runs.sinks import kinds
from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.run_sinks import wait_limits
from ampwise.runs.sinks.sink_context import Send, SinkContext, random_state_kept

GROUP = "ampwise.sinks"

OpenSink = Callable[[SinkContext], AbstractContextManager[Send]]


@dataclass(frozen=True, slots=True)
class SinkSyntax:
    """How the user names sinks (``--sink NAME`` or ``sinks=[...]``), for error messages."""

    template: str
    quoted: bool
    each: str  # how to name several

    def of(self, asked: object) -> str:
        plain = isinstance(asked, str) and asked and not self.quoted
        return self.template.format(asked if plain else repr(asked))

    def error(self, asked: object, what: str) -> BadInput:
        return BadInput(f"{self.of(asked)}: {what}")


COMMAND_LINE_SYNTAX = SinkSyntax("--sink {}", quoted=False, each="give --sink once for each")


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """A sink that was requested and is available; it is created by ``open``.

    at_a_time: most rows that it is sent at once; None for any number.
    """

    label: str
    open_sink: OpenSink
    about: SinkContext
    load_packages: Callable[[], None] | None = None
    at_a_time: int | None = None

    def load(self) -> None:
        """Import what ``open`` needs, in the calling thread; this may take a second."""
        if self.load_packages is not None:
            # A broken package fails again in open(), where it is reported.
            with random_state_kept(), suppress(Exception):
                self.load_packages()

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
        if callable(each):
            label = str(getattr(each, "__qualname__", type(each).__name__))
            context = SinkContext(base=base.absolute())
            found.setdefault(id(each), SinkRequest(label, _function_opener(each), context, at_a_time=1))
        else:
            name, target = _name_and_target(each, asking)
            place, request = _named_sink(name, SinkContext(base=base.absolute(), target=target), asking, sends)
            found.setdefault((name, place), request)
    if found:
        wait_limits()  # raises now if the variable is not a number
    return list(found.values())


def _name_and_target(asked: object, asking: SinkSyntax) -> tuple[str, str | None]:
    if not isinstance(asked, str):
        raise asking.error(asked, "expected the name of a sink, or a function that takes a row.")
    name, colon, target = asked.partition(":")
    if not name:
        known = ", ".join(sorted({*built_in_kinds(), *_plugins()}))
        raise asking.error(asked, f"expected the name of a sink{' before the colon' if colon else ''}: {known}.")
    if colon and not target:
        raise asking.error(
            asked, "expected a target after the colon. Without the colon, the sink uses its default target."
        )
    parts = [part.partition(":")[0] for part in asked.split(",")]
    if len(parts) > 1 and {parts[0], parts[-1]} <= set(built_in_kinds()):
        raise asking.error(asked, f"this is more than one sink: {asking.each}.")
    return name, target or None


def _named_sink(name: str, about: SinkContext, asking: SinkSyntax, sends: bool) -> tuple[object, SinkRequest]:
    """Return what the sink writes to, and the sink."""
    if name not in built_in_kinds():
        return about.target, SinkRequest(name, _plugin_opener(name, asking), about)
    kind = importlib.import_module(f"{kinds.__name__}.{name}")
    package: str | None = kind.PACKAGE
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{asking.of(name)}: {package} is not installed. pip install 'ampwise[{name}]'")
    why = kind.check(about) if sends and hasattr(kind, "check") else None
    if why is not None:
        raise asking.error(f"{name}:{about.target}" if about.target else name, f"{why}.")
    place = about.path(kind.SUFFIX).resolve() if hasattr(kind, "SUFFIX") else about.target
    return place, SinkRequest(name, kind.open_sink, about, load_packages=getattr(kind, "load", None))


def _plugin_opener(name: str, asking: SinkSyntax) -> OpenSink:
    plugins = _plugins()
    if name not in plugins:
        known = sorted({*built_in_kinds(), *plugins})
        unknown = UnknownName("sink", name, known, listing=f"The sinks are {', '.join(known)}.")
        unknown.args = (f"{asking.of(name)}: {unknown}",)
        raise unknown
    try:
        with random_state_kept():
            found: OpenSink = plugins[name].load()
    except Exception as error:  # third-party code may raise anything
        what = f"{plugins[name].value} cannot be loaded: {type(error).__name__}: {error}"
        raise asking.error(name, what) from error
    return found


def _plugins() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _function_opener(function: Callable[[MetricsRow], None]) -> OpenSink:
    @contextmanager
    def open_sink(about: SinkContext) -> Iterator[Send]:
        def send(rows: Sequence[MetricsRow]) -> None:
            for row in rows:
                function(row)

        yield send

    return open_sink
