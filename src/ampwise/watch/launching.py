"""``torchrun``, run so that each of the processes it starts is watched."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ampwise.printers.terminal import say
from ampwise.watch.script import Ended, Script

__all__ = ["is_launcher", "launch"]

MODULES = ("torch.distributed.run", "torch.distributed.launch")


def is_launcher(script: Script) -> bool:
    """Whether a script only starts others."""
    return script.name in MODULES if script.is_module else Path(script.name).name == "torchrun"


def launch(script: Script, folder: Path, options: list[str]) -> Ended:
    """Start the processes as torchrun would, each of them under the watch, with a part of the record of its own."""
    from torch.distributed import run as torchrun

    args = torchrun.get_args_parser().parse_args(list(script.args))
    if args.no_python:
        say("ampwise: warning: torchrun --no-python starts no Python that could be watched")
    else:
        words = ["run", "--part", "-o", str(folder), *options, *(["-m"] if args.module else [])]
        args.training_script_args = [*words, args.training_script, *args.training_script_args]
        args.module, args.training_script = True, "ampwise"
    try:
        with contextlib.suppress(KeyboardInterrupt):
            torchrun.run(args)
            return Ended("finished", 0)
        return Ended("interrupted", 130)
    except SystemExit as leaving:
        return Ended("finished", leaving.code if isinstance(leaving.code, int) else 1)
    except Exception as error:  # one of the processes failed, or a signal came; torchrun has said which
        return Ended("failed", 1, error)
