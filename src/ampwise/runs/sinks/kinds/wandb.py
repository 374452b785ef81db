"""Weights & Biases. The target is the project; without a target, WANDB_PROJECT or "ampwise".

If the script has its own run, the metrics are added to the rows that the script logs: a separate row would advance the
script's step, and W&B drops what the script then logs for an earlier step. So the script decides how often the metrics
are stored. Without a run of the script, the sink creates one that the script's calls do not see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ampwise.errors import MissingDependency
from ampwise.runs.sinks.metrics import PREFIX, STEP, MetricsRow, dashboard
from ampwise.runs.sinks.sink_context import Send, SinkContext

PACKAGE = "wandb"


def load() -> None:
    import wandb  # noqa: F401


@contextmanager
def open_sink(about: SinkContext) -> Iterator[Send]:
    import wandb

    own = _create_run(about) if wandb.run is None else None
    prepared: Any = None  # the script's run with our axis defined; the script may start another run

    def send(rows: Sequence[MetricsRow]) -> None:
        nonlocal prepared
        run: Any = own or wandb.run
        if run is None:  # the script has finished its run
            return
        if own is None and run is not prepared:
            prepared = _with_axis(run)
        for row in rows:
            run.log({STEP: row.step, **row.metrics}, commit=own is not None)

    try:
        yield send
    finally:
        if own is not None:
            own.finish()


def _create_run(about: SinkContext) -> Any:
    import wandb

    run: Any = wandb.init(
        project=about.target or os.environ.get("WANDB_PROJECT") or "ampwise",
        name=about.name,
        dir=os.environ.get("WANDB_DIR") or str(about.folder),
        mode=_mode(),
        reinit="create_new",  # does not set wandb.run
        settings=wandb.Settings(silent=True, console="off"),  # does not capture the script's output
    )
    with suppress(AttributeError):  # private: else a later wandb.init() in the script would return our run
        run._wl.remove_active_run(run)
    return _with_axis(run)


def _with_axis(run: Any) -> Any:
    run.define_metric(STEP, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=STEP)
    return run


def workspace(entity: str, project: str, name: str = "ampwise") -> Any:
    """Return a workspace with the charts of a dashboard, whose ``save()`` creates it; it needs wandb-workspaces."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ModuleNotFoundError as error:
        raise MissingDependency("workspace() needs wandb-workspaces: pip install wandb-workspaces") from error
    sections = [
        workspaces.Section(
            name=section,
            panels=[reports.LinePlot(title=title, x=STEP, y=names) for title, names in charts.items()],
            is_open=True,
        )
        for section, charts in dashboard().items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def _mode() -> Any:
    """Return None for W&B's own setting; "offline" if nobody is logged in, since it would prompt for a key."""
    import wandb

    if os.environ.get("WANDB_MODE") or wandb.setup().settings.mode != "online":
        return None
    return None if wandb.login(prompt=False, verify=False) else "offline"
