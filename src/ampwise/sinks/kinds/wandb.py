"""Weights & Biases. The target is the project; without one, WANDB_PROJECT, or "ampwise".

If the script has a run of its own, our numbers go into that, and with its rows: a row of ours by itself would count as
a step of the script's, and W&B drops what the script then logs for a step that is past. So the script decides how
often our numbers are kept there. Otherwise the run is ours alone, and the script's calls do not find it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ampwise.sinks.about import About, Send
from ampwise.sinks.metrics import PREFIX, STEP, Row

PACKAGE = "wandb"


def load() -> None:
    import wandb  # noqa: F401


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    import wandb

    own = _run_of_our_own(about) if wandb.run is None else None
    prepared: Any = None  # the script's run that has our axis; it may finish one and begin another

    def send(rows: Sequence[Row]) -> None:
        nonlocal prepared
        run: Any = own or wandb.run
        if run is None:  # the script has finished its run, and what comes late belongs to no other
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


def _run_of_our_own(about: About) -> Any:
    import wandb

    run: Any = wandb.init(
        project=about.target or os.environ.get("WANDB_PROJECT") or "ampwise",
        name=about.name,
        dir=os.environ.get("WANDB_DIR") or str(about.folder),
        mode=_mode(),
        reinit="create_new",  # and leave wandb.run to the script
        settings=wandb.Settings(silent=True, console="off"),  # the script's output is the script's
    )
    with suppress(AttributeError):  # private: a later wandb.init() of the script's would be given our run
        run._wl.remove_active_run(run)
    return _with_axis(run)


def _with_axis(run: Any) -> Any:
    run.define_metric(STEP, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=STEP)
    return run


def _mode() -> Any:
    """As W&B is set; offline where nobody has logged in, since it would ask for a key at the terminal."""
    import wandb

    if os.environ.get("WANDB_MODE") or wandb.setup().settings.mode != "online":
        return None
    return None if wandb.login(prompt=False, verify=False) else "offline"
