"""MLflow. The target is a tracking URI, a folder (with a slash, or a dot first), or else the name of an experiment.

Without one: MLFLOW_TRACKING_URI, or what MLflow takes without it; the experiment "ampwise", or MLFLOW_EXPERIMENT_NAME.
If the script has an active run, our metrics go into that; their steps are their own, as MLflow counts for each metric.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampwise.sinks.about import About, Send
from ampwise.sinks.apart import draw_apart
from ampwise.sinks.metrics import Row
from ampwise.sinks.places import why_no_folder

PACKAGE = "mlflow"
DATABASES = ("sqlite:", "postgresql:", "mysql:", "mssql:")
FIRST_WITH_DATABASE = (3, 7)  # as its usual place
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"  # without which MLflow 3.17 refuses to write to a folder
# Which wait longer by chance before they try again, make up names and numbers, or draw lots for telemetry.
DRAW = (
    "urllib3.util.retry",
    "mlflow.utils.rest_utils",
    "mlflow.utils.request_utils",
    "mlflow.utils.name_utils",
    "mlflow.telemetry.client",
    "mlflow.store.tracking.sqlalchemy_store",
)


def load() -> None:
    import mlflow.entities
    import mlflow.tracking.fluent
    import mlflow.utils.name_utils  # noqa: F401

    draw_apart(DRAW)


def check(about: About) -> str | None:
    uri = _place(about)[0] or os.environ.get("MLFLOW_TRACKING_URI") or _usual_place(about.folder)
    if uri.startswith(DATABASES) and importlib.util.find_spec("sqlalchemy") is None:
        return (
            f"MLflow would write to a database ({uri.partition(':')[0]}:), which mlflow-skinny alone cannot: "
            "pip install mlflow, or name a server (mlflow:http://…) or a folder (mlflow:./mlruns)"
        )
    return why_no_folder(Path(uri.removeprefix("file://"))) if uri.startswith("file:///") else None


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    uri, experiment = _place(about)
    theirs = _active_run()
    if theirs is not None:
        client = MlflowClient()
    else:
        with _files_allowed(uri):
            client = MlflowClient(tracking_uri=uri)
    draw_apart(DRAW)  # again: a client loads more of them
    run = theirs or client.create_run(_experiment_id(client, experiment), run_name=about.name)

    def send(rows: Sequence[Row]) -> None:
        metrics = [
            Metric(name, value, round(row.time * 1000), row.step) for row in rows for name, value in row.metrics.items()
        ]
        client.log_batch(run.info.run_id, metrics=metrics, synchronous=True)  # in as many requests as it takes

    try:
        yield send
    finally:
        if theirs is None:
            client.set_terminated(run.info.run_id)


def _place(about: About) -> tuple[str | None, str]:
    """The tracking URI, where one is given, and the experiment."""
    target, experiment = about.target, os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ampwise"
    if target is None:
        return None, experiment
    if target == "databricks" or ":" in target:
        return _from_where_it_began(target, about), experiment
    if target.startswith(".") or "/" in target or os.sep in target:
        return (about.folder / target).resolve().as_uri(), experiment
    return None, target


def _from_where_it_began(uri: str, about: About) -> str:
    path = uri.removeprefix("file:")
    return uri if path == uri or path.startswith("/") else (about.folder / path).resolve().as_uri()


def _usual_place(folder: Path) -> str:
    """Where MLflow 3 writes unless told: a database, or a folder that it has written to before."""
    loaded = sys.modules.get("mlflow")
    if loaded is not None:  # by a script that makes an Engine, and may have said where
        return str(loaded.get_tracking_uri())
    to_files = _version() < FIRST_WITH_DATABASE or any(folder.glob("mlruns/*/meta.yaml"))
    return "mlruns" if to_files else "sqlite:///mlflow.db"


def _version() -> tuple[int, ...]:
    from importlib import metadata

    try:
        return tuple(map(int, metadata.version("mlflow-skinny").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):  # unusual; opening it will tell
        return (0,)


@contextmanager
def _files_allowed(uri: str | None) -> Iterator[None]:
    """For a folder that the user has named, and while our client is made; the script's are allowed what they were."""
    if uri is None or not uri.startswith("file:") or ALLOW_FILES in os.environ:
        yield
        return
    os.environ[ALLOW_FILES] = "true"
    try:
        yield
    finally:
        os.environ.pop(ALLOW_FILES, None)


def _experiment_id(client: Any, name: str) -> Any:
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _active_run() -> Any:
    """The script's. MLflow keeps it by thread, and this is another one than the script's."""
    from mlflow.tracking import fluent

    of_all_threads = getattr(fluent, "_get_latest_active_run", fluent.active_run)
    return of_all_threads()
