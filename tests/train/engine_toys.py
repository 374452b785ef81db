"""A small model in training, and everything that a call can change in it."""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from ampwise import Engine

PRECISIONS = ["fp32", "bf16", "fp16"]
LOW = {"init_scale": 2.0**8}  # at which the toys do not overflow


def net(norm=False, dropout=0.0):
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))


def data(number, rows=6):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def training(precision="fp32", *, norm=False, dropout=0.0, schedule=None, make=AdamW, lr=0.01, **options):
    """A model, its optimizer and their engine; ``loss`` is its loss function. ``schedule`` makes schedulers."""
    model = net(norm, dropout)
    optimizer = make(model.parameters(), lr=lr)
    scheduler = None if schedule is None else schedule(optimizer)
    options = {"scaling": LOW, **options} if precision == "fp16" else options
    engine = Engine(model, optimizer, precision, scheduler=scheduler, **options)

    def loss(x, y):
        return F.mse_loss(model(x).float(), y)

    return SimpleNamespace(model=model, optimizer=optimizer, engine=engine, loss=loss, scheduler=scheduler)


OVERFLOW = "overflow"


class Overflow(torch.autograd.Function):
    """The same value, with a gradient that overflows in FP16 at any loss scale there is."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e12


def train(run, *numbers):
    """A micro-batch of each number; None for one with a NaN in it, OVERFLOW for gradients too large for FP16."""
    steps = []
    for number in numbers:
        x, y = data(number if isinstance(number, int) else 0)
        if number is None:
            x = x * torch.nan
        loss = (lambda x, y: Overflow.apply(run.loss(x, y))) if number == OVERFLOW else run.loss
        steps.append(run.engine.step(loss, x, y))
    return steps


def everything(run):
    """What a call that is refused must not change."""
    engine, window = run.engine, run.engine._accumulator
    return copy.deepcopy(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "gradients": [parameter.grad for parameter in run.model.parameters()],
            "scaler": engine.scaler.state_dict(),
            "window": (window.length, window.count, window.loss, window.passes, window.total, window.unit),
            "schedulers": engine._schedules.state(),
            "counts": (engine.applied_steps, engine.skipped_steps, len(engine.history)),
            "rng": torch.get_rng_state(),
        }
    )


def same(one, other):
    """To the last bit, in whatever is nested how."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]
