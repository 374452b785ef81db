"""TensorBoard's event files. The target is their folder; without one, RUN.tensorboard, made anew.

Values are single precision there; inf and NaN stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ampwise.sinks.about import About, Send
from ampwise.sinks.metrics import Row
from ampwise.sinks.places import why_no_folder

PACKAGE = "tensorboard"
SUFFIX = "tensorboard"
EVENTS = "events.out.tfevents.*"


def load() -> None:
    import tensorboard.compat.proto.event_pb2
    import tensorboard.compat.proto.summary_pb2
    import tensorboard.summary.writer.event_file_writer  # noqa: F401


def check(about: About) -> str | None:
    return None if _is_bucket(about) else why_no_folder(about.path(SUFFIX))


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(_folder(about))

    def send(rows: Sequence[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            writer.add_event(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))
        writer.flush()

    try:
        yield send
    finally:
        writer.close()


def _folder(about: About) -> str:
    if about.target and _is_bucket(about):
        return about.target
    folder = about.path(SUFFIX)
    if about.target is None:
        _clear(folder)
    return str(folder)


def _is_bucket(about: About) -> bool:
    """Which TensorBoard has writers for."""
    return about.target is not None and "://" in about.target


def _clear(folder: Path) -> None:
    """Of an earlier run with this name, whose record was written over: TensorBoard would draw the two as one."""
    for path in folder.glob(EVENTS):
        path.unlink()
