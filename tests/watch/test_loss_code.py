"""The script's code of a loss, run again, gives the same loss: for the ways in which training loops are written."""

import runpy
import sys
import textwrap

import pytest
import torch
from torch import nn

from ampwise.watch.loss_code import loss_code, running_code

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]

def criterion(output, target):
    return (output - target).square().mean()
"""

SHAPES = {
    "at module level": """
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """,
    "in a function, with autocast, a rebound batch and a penalty": """
        def train(model, data):
            total, seen = 0.0, []
            for step, (x, y) in enumerate(data):
                x = x * 2 + 1
                noise = torch.randn_like(x)
                with torch.autocast("cpu"):
                    output = model(x + noise)
                    seen.append(step)
                    loss = criterion(output.float(), y)
                penalty = sum(p.square().sum() for p in model.parameters())
                loss += 0.1 * penalty
                loss = loss / 2
                total += loss.item()
                loss.backward()
            assert seen == [0, 1, 2]

        train(model, data)
    """,
    "a model called in a helper": """
        def compute(model, batch, *, weight=1.0):
            x, y = batch
            return {"main": criterion(model(x), y), "weight": weight}

        for batch in data:
            losses = compute(model, batch, weight=3.0)
            total = losses["main"] * losses["weight"]
            torch.autograd.backward(total)
    """,
    "a loss handed to a helper": """
        class Scaler:
            def __call__(self, loss, optimizer, *, divisor=4):
                loss = loss / divisor
                loss.backward()
                optimizer.step()

        scaler = Scaler()
        for x, y in data:
            scaler(criterion(model(x), y), optimizer, divisor=8)
    """,
    "attributes set by other methods": """
        class Trainer:
            def __init__(self):
                self.model, self.history = model, []

            def forward(self):
                self.output = self.model(self.x)

            def compute_loss(self):
                self.loss = criterion(self.output, self.y)
                self.history.append(float(self.loss.detach()))

            def optimize(self):
                self.forward()
                self.compute_loss()
                self.step()

            def step(self):
                self.loss.backward()

        trainer = Trainer()
        for trainer.x, trainer.y in data:
            trainer.optimize()
    """,
    "branches, a loop of parts and a list": """
        def losses_of(output, y):
            parts = []
            for i in range(4):
                parts.append((output[:, i] - y[:, i]).square().mean())
            return parts

        def step(x, y, use_l1):
            output = model(x)
            parts = losses_of(output, y)
            total = 0
            for part in parts:
                total = total + part
            if use_l1:
                total = total + F.l1_loss(output, y)
            try:
                total.backward()
            finally:
                optimizer.zero_grad()

        for x, y in data:
            step(x, y, use_l1=True)
    """,
    "accumulation over micro-batches": """
        def train(batches, steps=2):
            for window in range(2):
                for micro in range(steps):
                    x, y = batches[micro]
                    with torch.enable_grad():
                        loss = criterion(model(x), y) / steps
                    loss.backward()
                optimizer.step()

        train(data)
    """,
    "a closure": """
        def make(model):
            scale = torch.tensor(2.0)

            def step(x, y):
                def weigh(value):
                    return value * scale
                loss = weigh(criterion(model(x), y))
                loss.backward()
            return step

        step = make(model)
        for x, y in data:
            step(x, y)
    """,
}


def run_watched(folder, monkeypatch, shape):
    """Run a script, and return for each backward pass its loss and that of its code, run again."""
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(shape))
    calls, random, found = [], [], []

    def before_model(module, args):
        if isinstance(module, nn.Sequential):
            calls.append(running_code())
            random.append(torch.get_rng_state())

    original = torch.autograd.backward

    def backward(loss, *args, **kwargs):
        code, begin, now = loss_code(sys._getframe(1), list(calls)), random[0], torch.get_rng_state()
        calls.clear()
        random.clear()
        torch.set_rng_state(begin)
        found.append((loss.detach().clone(), None if code is None else code.run()))
        torch.set_rng_state(now)
        calls.clear()
        random.clear()
        return original(loss, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", backward)
    handle = nn.modules.module.register_module_forward_pre_hook(before_model)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_the_code_gives_the_same_loss(tmp_path, monkeypatch, shape):
    found = run_watched(tmp_path, monkeypatch, SHAPES[shape])
    assert len(found) >= 3
    for loss, again in found:
        assert isinstance(again, torch.Tensor)
        assert again.requires_grad
        assert torch.equal(again.detach(), loss)


def test_what_comes_before_the_model_is_not_run_again(tmp_path, monkeypatch):
    found = run_watched(
        tmp_path,
        monkeypatch,
        """
        batches = iter(data)
        for _ in data:
            x, y = next(batches)
            loss = criterion(model(x), y)
            loss.backward()
        """,
    )
    assert [torch.equal(loss, again) for loss, again in found] == [True] * 3


def test_code_without_a_file_is_left_alone(tmp_path, monkeypatch):
    ((_, again),) = run_watched(
        tmp_path, monkeypatch, "\nexec('criterion(model(data[0][0]), data[0][1]).backward()')\n"
    )
    assert again is None
