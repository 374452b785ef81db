"""MLflow. The target is a tracking URI, or a folder as one (file:…), or else the name of an experiment.

Without one: MLFLOW_TRACKING_URI, or what MLflow takes without it; the experiment "ampwise", or MLFLOW_EXPERIMENT_NAME.
If the script has an active run, our metrics go into that; their steps are their own, as MLflow counts for each metric.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampwise.sinks.about import About, Send
from ampwise.sinks.metrics import Row

PACKAGE = "mlflow"


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    uri, experiment = _place(about.target)
    theirs = _active_run()
    client = MlflowClient() if theirs is not None else MlflowClient(tracking_uri=uri)
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


def _place(target: str | None) -> tuple[str | None, str]:
    """The tracking URI, where one is given, and the experiment."""
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ampwise"
    if target is None:
        return None, experiment
    return (target, experiment) if ":" in target or target == "databricks" else (None, target)


def _experiment_id(client: Any, name: str) -> Any:
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _active_run() -> Any:
    """The script's. MLflow keeps it by thread, and this is another one than the script's."""
    from mlflow.tracking import fluent

    of_all_threads = getattr(fluent, "_get_latest_active_run", fluent.active_run)
    return of_all_threads()
