"""MLflow. The target is a tracking URI, a folder (with a slash or a leading dot), or else the name of an experiment.

Without a target: MLFLOW_TRACKING_URI or MLflow's default, and the experiment MLFLOW_EXPERIMENT_NAME or "ampwise". If
the script has an active run, the metrics are logged to it, with their own steps: MLflow counts steps per metric.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.sink_context import Send, SinkContext, use_separate_random, why_folder_not_writable

PACKAGE = "mlflow"
DATABASES = ("sqlite:", "postgresql:", "mysql:", "mssql:")
FIRST_WITH_DATABASE = (3, 7)  # version that writes to a database by default
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"  # without which MLflow 3.17 refuses to write to a folder
# Modules that draw random numbers, for retries, names, ids and telemetry.
RANDOM_MODULES = (
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

    use_separate_random(RANDOM_MODULES)


def check(about: SinkContext) -> str | None:
    uri = _uri_and_experiment(about)[0] or os.environ.get("MLFLOW_TRACKING_URI") or _default_uri(about.folder)
    if uri.startswith(DATABASES) and importlib.util.find_spec("sqlalchemy") is None:
        return (
            f"MLflow would write to a database ({uri.partition(':')[0]}:), which mlflow-skinny alone cannot: "
            "pip install mlflow, or name a server (mlflow:http://…) or a folder (mlflow:./mlruns)"
        )
    return why_folder_not_writable(Path(uri.removeprefix("file://"))) if uri.startswith("file:///") else None


@contextmanager
def open_sink(about: SinkContext) -> Iterator[Send]:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient, fluent

    uri, experiment = _uri_and_experiment(about)
    # The script's active run: MLflow stores it by thread, and this is not the script's thread.
    theirs = getattr(fluent, "_get_latest_active_run", fluent.active_run)()
    if theirs is not None:
        client = MlflowClient()
    else:
        with _files_allowed(uri):
            client = MlflowClient(tracking_uri=uri)
    use_separate_random(RANDOM_MODULES)  # again, because a client loads more of them
    run = theirs
    if run is None:
        found = client.get_experiment_by_name(experiment)
        experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
        run = client.create_run(experiment_id, run_name=about.name)

    def send(rows: Sequence[MetricsRow]) -> None:
        metrics = [
            Metric(name, value, round(row.time * 1000), row.step) for row in rows for name, value in row.metrics.items()
        ]
        client.log_batch(run.info.run_id, metrics=metrics, synchronous=True)  # in as many requests as it takes

    try:
        yield send
    finally:
        if theirs is None:
            client.set_terminated(run.info.run_id)


def _uri_and_experiment(about: SinkContext) -> tuple[str | None, str]:
    """Return the tracking URI, if one is given, and the experiment."""
    target, experiment = about.target, os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ampwise"
    if target is None:
        return None, experiment
    path = target.removeprefix("file:")
    if path != target and not path.startswith("/"):
        return (about.folder / path).resolve().as_uri(), experiment
    if target == "databricks" or ":" in target:
        return target, experiment
    if target.startswith(".") or "/" in target or os.sep in target:
        return (about.folder / target).resolve().as_uri(), experiment
    return None, target


def _default_uri(folder: Path) -> str:
    """Return where MLflow 3 writes by default: a database, or a folder that it has written to before."""
    loaded = sys.modules.get("mlflow")
    if loaded is not None:  # by a script, which may have set the URI
        return str(loaded.get_tracking_uri())
    try:
        version = tuple(map(int, metadata.version("mlflow-skinny").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):  # unusual; opening the sink reports it
        version = (0,)
    to_files = version < FIRST_WITH_DATABASE or any(folder.glob("mlruns/*/meta.yaml"))
    return "mlruns" if to_files else "sqlite:///mlflow.db"


@contextmanager
def _files_allowed(uri: str | None) -> Iterator[None]:
    """Let MLflow write to a folder that the user has named, only while our client is created."""
    if uri is None or not uri.startswith("file:") or ALLOW_FILES in os.environ:
        yield
        return
    os.environ[ALLOW_FILES] = "true"
    try:
        yield
    finally:
        os.environ.pop(ALLOW_FILES, None)
