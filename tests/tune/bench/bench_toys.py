"""Small models with and without faults, a clock that says what it is told, and evidence to judge."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.bench.lineup import Contender, make_contenders
from ampwise.tune.bench.speeds import LossCheck, PrecisionRow, SpeedComparison, TimeSplit, TimeSpread
from ampwise.tune.train_case import make_factory, make_optimizer

WIDTH = 16


def mlp(batch=8):
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    x, y = torch.randn(batch, WIDTH), torch.randint(4, (batch,))
    return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)


def other_under_autocast():
    """What an `if` on the precision makes of a model."""
    model, batch, loss_fn = mlp()

    def loss(x, y):
        found = loss_fn(x, y)
        return found * 1.5 if torch.is_autocast_enabled("cpu") else found

    return model, batch, loss


def overflows_in_half():
    model, (x, y), _ = mlp()
    return model, (x, y), lambda x, y: F.cross_entropy((model(x) * 1e6).to(model(x).dtype).float(), y)


def fails_in_half():
    model, batch, loss_fn = mlp()

    def loss(x, y):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("mat1 and mat2 must have the same dtype")
        return loss_fn(x, y)

    return model, batch, loss


def runs_out_of_memory(dtype=torch.bfloat16, error=None):
    """A maker of a model for which there is no room in one precision."""

    def make():
        model, batch, loss_fn = mlp()

        def loss(x, y):
            if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == dtype:
                raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return loss_fn(x, y)

        return model, batch, loss

    return make


class Clock:
    """Runs what it is given, and says for each contender what it is told: a number, or one for each turn."""

    def __init__(self, seconds=None, other=0.001):
        self.seconds = {label: list(v) if isinstance(v, list) else v for label, v in (seconds or {}).items()}
        self.other = other
        self.turns = []

    def __call__(self, work, times):
        for _ in range(times):
            work()
        label = getattr(work, "label", None)
        self.turns.append((label, times))
        said = self.seconds.get(label, self.other)
        return said.pop(0) if isinstance(said, list) else said


def fielded(make, *entries, clip_norm=1.0, kept=()):
    """Contenders of a subject that is made."""
    subject = make_factory(make).make()
    optimizer = make_optimizer("sgd", subject.parameters, fused=False)
    made = [entry if isinstance(entry, tuple) else (entry, False) for entry in entries]
    return subject, make_contenders(made, subject, optimizer, clip_norm=clip_norm, kept=kept)


def contender(make=mlp, precision="fp32"):
    return fielded(make, precision)[1][0]


def same(value):
    return TimeSpread(median=value, low=value, high=value)


def row(precision="bf16", ratio=None, *, step_s=None, compiled=False, loss=None, **parts):
    """A row that was measured, ``ratio`` times as fast as an FP32 of one second."""
    return PrecisionRow(
        precision=precision,
        compiled=compiled,
        ratio=None if ratio is None else same(ratio),
        ratio_to_eager=None if ratio is None else same(ratio),
        step_s=same(step_s if step_s is not None else 1 / ratio) if ratio or step_s else None,
        loss=loss or LossCheck(loss=2.0, reference=2.0, tolerance=0.1),
        **parts,
    )


def split(on_device=True, busy=1.0, launches=100, **seconds):
    return TimeSplit(seconds=seconds or {"matrix": busy}, busy=busy, launches=launches, on_device=on_device)


def speeds(*rows, **parts):
    base = row("fp32", 1.0)
    usual = {
        "name": "train:make",
        "command": "ampwise bench train:make",
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "noise": 0.01,
        "rounds": 5,
        "batch": 16,
    }
    return SpeedComparison(rows=(base, *rows), **{**usual, **parts})


__all__ = ["Clock", "Contender", "contender", "fielded", "mlp", "row", "same", "speeds", "split"]
