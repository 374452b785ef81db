"""Try a ``make`` in a process of its own, on the CPU: call it, run forward and backward once.

Only that process runs code of the script. It has no network, writes no bytecode next to the script, and is ended with
all that it started when its time is up, when it is done, or when the command that started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampwise.finding.terminal import printable
from ampwise.tune.init.reading import read_training_script
from ampwise.tune.init.writing import Draft, drafts_of

# For libraries and programs that the script may start, such as pip: no downloads.
NOWHERE = dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
)
HUB = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
OFFLINE = {**NOWHERE, **HUB, "PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}


@dataclass(slots=True)
class Outcome:
    """What came of it: the draft that ran, or what the last one failed with."""

    ran: bool = False
    draft: int = 0  # index of the draft that ran, or failed with this error
    text: str = ""  # the file
    phase: str = "loading torch"
    loss: float = math.nan
    parameters: int = 0
    rows: int | None = None
    seconds: float = 0.0
    is_random: bool = False  # the batch is random data
    is_known: bool = False  # of the size in the script, not found by trying
    data_error: str = ""  # why the script's own data is not used
    error: str = ""
    error_line: int | None = None  # in the file


def try_in_process(script: str, output: Path, options: Sequence[str], limit_s: float) -> Outcome:
    """Try the drafts for a script in a process of its own, until one runs."""
    with tempfile.TemporaryDirectory(prefix="ampwise-init-") as scratch:
        asked, told, errors = (Path(scratch, name) for name in ("asked", "told", "errors"))
        asked.write_text(json.dumps([script, str(output.absolute()), list(options), str(told), os.getpid()]))
        root = str(Path(__file__).parents[3])  # let the process find this very package
        environment = {
            **os.environ,
            **OFFLINE,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "MPLBACKEND": "Agg",
        }
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(asked)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:  # also on Ctrl-C; what the script started, such as workers, ends too
                _kill_group(process.pid)
                process.kill()
                process.wait()
        outcome = Outcome(**json.loads(told.read_text())) if told.exists() else Outcome()
        if late:
            outcome.ran, outcome.text, outcome.error_line = False, "", None
            outcome.error = f"not done after {limit_s:g} s ({outcome.phase})"
        elif not outcome.ran and not outcome.error:
            outcome.text = ""
            outcome.error = f"the process ended with code {process.returncode} ({outcome.phase})"
        elif outcome.error.startswith("SystemExit"):  # argparse has said why
            said = errors.read_bytes()[-2000:].decode(errors="replace").strip().split("\n")[-1]
            outcome.error = f"the script exits: {printable(said)[:300] or outcome.error}"
        return outcome


def _kill_group(group: int) -> None:
    with contextlib.suppress(AttributeError, ProcessLookupError, PermissionError):  # on Windows; if it is gone
        os.killpg(group, signal.SIGKILL)


# In the process.


def main(asked: str) -> None:
    """Try the drafts for a script; write the outcome."""
    script, output, options, told, parent = json.loads(Path(asked).read_text())

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        _kill_group(os.getpid())
        os._exit(1)

    def tell(outcome: Outcome) -> None:
        partial = Path(told).with_suffix(".part")
        partial.write_text(json.dumps(asdict(outcome)))
        partial.replace(told)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _refuse_network()
    import ampwise.tune.init.random_batch  # noqa: F401 (before files of the user can be taken for libraries)

    path = Path(output)
    sys.path[:0] = [str(path.parent.resolve())]
    sys.path.append(str(Path.cwd()))
    tell(try_drafts(drafts_of(read_training_script(script), path, options), path, tell))


def _refuse_network() -> None:
    import socket

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError("ampwise init makes no connection to the network")

    socket.socket.connect = refuse  # type: ignore[method-assign]
    socket.socket.connect_ex = refuse  # type: ignore[method-assign]
    socket.getaddrinfo = refuse
    socket.create_connection = refuse


def try_drafts(drafts: Sequence[Draft], path: Path, tell: Callable[[Outcome], None]) -> Outcome:
    """Try drafts of the file at ``path`` in this process, until one runs; ``tell`` is called as it proceeds."""
    from ampwise.trace.user_code import describe_error

    outcome = Outcome()
    for index, draft in enumerate(drafts):
        before = drafts[index - 1] if index else None
        if before is not None and before.optimizer and not draft.optimizer:
            failed = outcome.text.split("\n")[(outcome.error_line or 1) - 1]
            if before.optimizer not in failed:  # leaving the optimizer out does not help
                continue
        outcome.draft, outcome.error, outcome.error_line = index, "", None
        try:
            _try(draft, path, outcome, tell)
        except (Exception, SystemExit) as error:
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == str(path):
                    outcome.error_line = trace.tb_lineno
                trace = trace.tb_next
            outcome.error, outcome.text = describe_error(error), draft.text()
            if isinstance(error, SystemExit) and error.code == 2:  # options are missing, not the data
                break
            if not draft.slots:
                outcome.data_error = outcome.error
        else:
            outcome.ran = True
            break
    return outcome


def _try(draft: Draft, path: Path, outcome: Outcome, tell: Callable[[Outcome], None]) -> None:
    """Run a step of a draft; look for a batch if it has none."""
    import torch

    from ampwise.tune.init.random_batch import ROWS, find_batch, run_step
    from ampwise.tune.train_case import make_factory

    def load() -> Callable[..., Any]:
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[path.stem] = module
        exec(compile(outcome.text, str(path), "exec"), module.__dict__)
        return module.make  # type: ignore[no-any-return]

    def enter(phase: str) -> None:
        outcome.phase = phase
        tell(outcome)

    torch.manual_seed(0)
    outcome.is_random, options = draft.batch_lines is None, {}
    outcome.text = draft.text(without_batch=outcome.is_random)
    enter("importing")
    make = load()
    enter("calling make()")
    if outcome.is_random:
        model, _, loss_fn, *_ = make()
        enter("looking for a batch that the model takes")
        outcome.is_known = find_batch(model, loss_fn, draft)
        outcome.text, options = draft.text(), {draft.size_name: ROWS}
        make = load()
    made = make(**options)
    enter("forward and backward")
    started = time.perf_counter()
    case = make_factory(lambda: made, "make").make("cpu")
    outcome.loss = run_step(case)
    outcome.seconds, outcome.rows = time.perf_counter() - started, case.rows
    outcome.parameters = sum(parameter.numel() for parameter in case.model.parameters())


if __name__ == "__main__":
    main(sys.argv[1])
