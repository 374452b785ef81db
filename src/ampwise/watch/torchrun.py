"""Run ``torchrun`` such that each process it starts is watched."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ampwise.finding.terminal import say
from ampwise.watch.script import ScriptExit, ScriptToRun

__all__ = ["is_launcher", "launch"]

MODULES = ("torch.distributed.run", "torch.distributed.launch")


def is_launcher(script: ScriptToRun) -> bool:
    """Whether the script is torchrun."""
    return script.name in MODULES if script.is_module else Path(script.name).name == "torchrun"


def launch(script: ScriptToRun, folder: Path, options: list[str]) -> ScriptExit:
    """Start the processes as torchrun would, each of them watched, with its own part of the record."""
    from torch.distributed import run as torchrun

    args = torchrun.get_args_parser().parse_args(list(script.args))
    if args.no_python:
        say("ampwise: warning: processes that torchrun --no-python starts are not watched")
    else:
        words = ["run", "--part", "-o", str(folder), *options, *(["-m"] if args.module else [])]
        args.training_script_args = [*words, args.training_script, *args.training_script_args]
        args.module, args.training_script = True, "ampwise"
    try:
        with contextlib.suppress(KeyboardInterrupt):
            torchrun.run(args)
            return ScriptExit("finished", 0)
        return ScriptExit("interrupted", 130)
    except SystemExit as leaving:
        return ScriptExit("finished", leaving.code if isinstance(leaving.code, int) else 1)
    except Exception as error:  # a process failed, or a signal came; torchrun has printed which
        return ScriptExit("failed", 1, error)
