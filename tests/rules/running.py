"""Scripts that are run before and after ``ampwise check --fix``, in this process."""

import os
import warnings
from pathlib import Path

import torch

from ampwise.cli import main


def fixed(data, folder, *words):
    """What ``check --fix`` makes of a script in a folder."""
    file = Path(folder, "train.py")
    file.write_bytes(data)
    here = Path.cwd()
    os.chdir(folder)
    try:
        main(["check", "--fix", "--isolated", "--exit-zero", *words, "train.py"])
    finally:
        os.chdir(here)
    return file.read_bytes()


def outcome(data):
    """What came of a script: the error, or None, and the weights of its ``model``."""
    torch.manual_seed(0)
    space = {"__name__": "__main__"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(data, "train.py", "exec"), space)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    return None, torch.cat([weight.detach().flatten() for weight in space["model"].parameters()])


def without_scaler(data):
    """The same script with the scaler off: how training should go."""
    return data.replace(b'GradScaler("cpu"', b'GradScaler("cpu", enabled=False')
