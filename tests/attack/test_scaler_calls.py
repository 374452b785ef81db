"""Random training loops: ``ampwise.GradScaler`` does what ``torch.amp.GradScaler`` does, call by call.

Two optimizers share a scaler; gradients overflow now and then, states are saved and loaded at any moment. After each
call both scalers hold the same scale, and the weights are equal to the last bit. A loop ends with a call out of order,
which both refuse alike.
"""

import math
import random

import pytest
import torch
from torch import nn

import ampwise

from .effort import rounds

MAKERS = {
    # Without momentum, whose buffer torch's fused SGD leaves uninitialised when the first step is skipped.
    "SGD": lambda weights, how: torch.optim.SGD(weights, lr=0.5, **how),
    "AdamW": lambda weights, how: torch.optim.AdamW(weights, lr=0.5, **how),
}
WAYS = ({"foreach": False}, {"foreach": True}, {"fused": True})
GRADIENTS = (1.0, -0.5, 3.0, 0.0, 1e30, math.inf, math.nan)
OUT_OF_ORDER = (("unscale", "unscale"), ("step", "step"), ("step", "unscale"), ("update", "update"))


class Side:
    """One of the two: a scaler, two parameters with an optimizer each, and what was saved."""

    def __init__(self, scaler, maker, way):
        self.scaler = scaler
        self.weights = [nn.Parameter(torch.full((3,), 0.25)) for _ in range(2)]
        self.optimizers = [MAKERS[maker]([weight], way) for weight in self.weights]
        self.saved = None

    def call(self, name, which=0, number=1.0):
        """Make the call; the loss scale after it."""
        weight, optimizer, scaler = self.weights[which], self.optimizers[which], self.scaler
        calls = {
            "backward": lambda: scaler.scale((weight * torch.tensor([1.0, number, 2.0])).sum()).backward(),
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: nn.utils.clip_grad_norm_([weight], 1.0),
            "overwrite": lambda: weight.grad.fill_(number),
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
            "set_scale": lambda: scaler.update(64.0),
            "interval": lambda: scaler.set_growth_interval(2),
            "zero_grad": lambda: optimizer.zero_grad(set_to_none=number > 0),
            "save": lambda: setattr(self, "saved", scaler.state_dict()),
            "load": lambda: scaler.load_state_dict(self.saved or scaler.state_dict()),
        }
        calls[name]()
        return scaler.get_scale()

    def refusal(self, name, which):
        try:
            self.call(name, which)
        except (RuntimeError, AssertionError) as error:
            return type(error)
        return None


def iteration(rng):
    """The calls of one step, in an order that is right."""
    stepped, micro_batches = rng.choice([(0,), (1,), (0, 1), (1, 0)]), rng.choice([1, 1, 2])
    for which in stepped * micro_batches:
        yield "backward", which, rng.choice(GRADIENTS if rng.random() < 0.3 else GRADIENTS[:4])
    for which in stepped:
        for name in rng.choice([(), (), ("unscale",), ("unscale", "clip"), ("overwrite",)]):
            yield name, which, rng.choice(GRADIENTS)
        yield "step", which
    yield from ((name,) for name in ("save", "load", "interval") if rng.random() < 0.15)
    yield ("update",)
    yield from (("zero_grad", which, rng.choice([0.0, 1.0])) for which in (0, 1))
    yield from ((name,) for name in ("set_scale", "save", "load") if rng.random() < 0.1)


@pytest.mark.half_by_day
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_any_loop_ends_as_with_torch(maker, way):
    for seed in range(rounds(4, 150)):
        rng = random.Random(f"{maker} {way} {seed}")
        options = {"init_scale": 2.0**10, "growth_interval": rng.choice([1, 3, 2000])}
        theirs = Side(torch.amp.GradScaler("cpu", **options), maker, way)
        ours = Side(ampwise.GradScaler("cpu", min_scale=2.0**-60, **options), maker, way)
        history = []
        for call in (call for _ in range(8) for call in iteration(rng)):
            history.append(call)
            assert ours.call(*call) == theirs.call(*call), history
            for one, other in zip(ours.weights, theirs.weights, strict=True):
                assert torch.equal(one.nan_to_num(nan=-7e7), other.nan_to_num(nan=-7e7)), history
        first, second = rng.choice(OUT_OF_ORDER)
        for side in (ours, theirs):
            side.call("backward", 0)
            if first == "update":
                side.call("step", 0)
            side.call(first, 0)
        assert ours.refusal(second, 0) is theirs.refusal(second, 0) is not None, (first, second)
