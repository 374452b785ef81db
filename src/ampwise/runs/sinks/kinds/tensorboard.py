"""TensorBoard event files. The target is their folder; without a target, RUN.tensorboard, which is overwritten.

Values are stored in single precision; inf and NaN are kept. A layout arranges them in the tab "Custom scalars".
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampwise.runs.sinks.metrics import MetricsRow, dashboard
from ampwise.runs.sinks.sink_context import Send, SinkContext, why_folder_not_writable

PACKAGE = "tensorboard"
SUFFIX = "tensorboard"


def load() -> None:
    import tensorboard.compat.proto.event_pb2
    import tensorboard.compat.proto.summary_pb2
    import tensorboard.plugins.custom_scalar.layout_pb2
    import tensorboard.plugins.custom_scalar.metadata
    import tensorboard.summary.writer.event_file_writer  # noqa: F401


def check(about: SinkContext) -> str | None:
    return None if _is_bucket(about) else why_folder_not_writable(about.path(SUFFIX))


@contextmanager
def open_sink(about: SinkContext) -> Iterator[Send]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = about.path(SUFFIX)
    if about.target is None:  # remove events of an earlier run of this name: TensorBoard would draw both as one
        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
    writer = EventFileWriter(str(about.target if _is_bucket(about) else folder))
    writer.add_event(Event(wall_time=time.time(), summary=_layout()))

    def send(rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            writer.add_event(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))
        writer.flush()

    try:
        yield send
    finally:
        writer.close()


def _layout() -> Any:
    """Return the charts of the tab "Custom scalars" as a summary."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import metadata
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

    categories = []
    for section, charts in dashboard().items():
        shown = [
            Chart(title=title, multiline=MultilineChartContent(tag=[f"^{re.escape(name)}$" for name in names]))
            for title, names in charts.items()
        ]
        categories.append(Category(title=f"ampwise: {section}", chart=shown))
    layout = TensorProto(dtype="DT_STRING", string_val=[Layout(category=categories).SerializeToString()])
    about_it = metadata.create_summary_metadata()
    return Summary(value=[Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=about_it, tensor=layout)])


def _is_bucket(about: SinkContext) -> bool:
    """Whether the target is a URL, which TensorBoard writes to itself."""
    return about.target is not None and "://" in about.target
