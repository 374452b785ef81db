"""Fixes of scripts put together at random: what ran before runs after, and trains as without the loss scale."""

import random
import re

import torch

from ..rules.running import fixed, outcome, without_scaler
from .effort import rounds

HEAD = """\
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


class NoScaler:
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass


model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.full((2, 3), 1.0 + number) for number in range(4)]
AMP = {amp}
"""
SCALERS = [
    'scaler = torch.amp.GradScaler("cpu")',
    'scaler = torch.amp.GradScaler("cpu")',
    'scaler = torch.amp.GradScaler("cpu") if AMP else None',
    'scaler = torch.amp.GradScaler("cpu") if AMP else NoScaler()',
    'scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)',
    'scaler = None\nif AMP:\n    scaler = torch.amp.GradScaler("cpu")',
    'if AMP:\n    scaler = torch.amp.GradScaler("cpu")\nelse:\n    scaler = NoScaler()',
    'scaler = NoScaler()\nif AMP: scaler = torch.amp.GradScaler("cpu")',
    'if AMP:\n    scaler = torch.amp.GradScaler("cpu")',
]
BACKWARDS = [
    "scaler.scale(loss).backward()",
    "scaler.scale(loss).backward()",
    "scaler.scale(loss).backward()",
    "scaler.scale(loss).backward(); seen = 1",
    "scaled = scaler.scale(loss)\nscaled.backward()",
    "loss.backward()",
    "if scaler is not None:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()",
    "(scaler.scale(loss) if scaler is not None else loss).backward()",
    "with torch.enable_grad():\n    scaler.scale(loss).backward()",
    "scaler.scale(loss / 2).backward(retain_graph=True)\nscaler.scale(loss / 2).backward()",
    "(loss / 2).backward(retain_graph=True)\n(loss / 2).backward()",
    "for part in (loss / 2, loss / 2):\n    scaler.scale(part).backward(retain_graph=True)",
]
CLIPS = [
    "clip_grad_norm_(model.parameters(), 0.1)",
    "clip_grad_norm_(model.parameters(), 0.1)",
    "norm = clip_grad_norm_(model.parameters(), 0.1)",
    "clip_grad_norm_(\n    model.parameters(),\n    0.1,\n)",
    "clip_grad_norm_(model.parameters(), 0.1); clip_grad_value_(model.parameters(), 0.05)",
    "clip_grad_norm_(model.parameters(), 0.1)\nclip_grad_value_(model.parameters(), 0.05)",
    "clip_grad_norm_(model.parameters(), 0.1)\nscaler.unscale_(optimizer)",
    "if AMP: clip_grad_norm_(model.parameters(), 0.1)",
    "if AMP:\n    clip_grad_norm_(model.parameters(), 0.1)\n"
    "if number > 0:\n    clip_grad_value_(model.parameters(), 0.05)",
    "if number > 5:\n    pass\nelif number >= 0:\n    clip_grad_norm_(model.parameters(), 0.1)",
    "if scaler is not None:\n    clip_grad_norm_(model.parameters(), 0.1)",
    "for weight in model.parameters():\n    clip_grad_norm_(weight, 0.1)",
    "for weight in model.parameters():\n    if weight.grad is None: continue\n    clip_grad_norm_(weight, 0.1)",
    "[clip_grad_norm_(weight, 0.1) for weight in model.parameters()]",
    "norm = clip_grad_norm_(model.parameters(), 0.1)\nif number == 1:\n    optimizer.zero_grad()\n    continue",
    "norm = clip_grad_norm_(model.parameters(), 0.1)\nassert norm > 0",
    "try:\n    clip_grad_norm_(model.parameters(), 0.1)\nfinally:\n    seen = number",
    "try:\n    clip_grad_norm_(model.parameters(), 0.1)\nexcept RuntimeError:\n    continue",
    "with torch.no_grad():\n    clip_grad_norm_(model.parameters(), 0.1)",
    "limit(model)",
    "",
]
STEPS = [
    "scaler.step(optimizer)\nscaler.update()",
    "scaler.step(optimizer)\nscaler.update()",
    "scaler.step(optimizer)\nscaler.update()",
    "scaler.step(optimizer); scaler.update()",
    "scaler.step(optimizer)",
    "done = scaler.step(optimizer)\nscaler.update()",
    "if scaler is not None:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
    "if AMP:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
    "if AMP: scaler.step(optimizer); scaler.update()",
    "scaler.step(optimizer) if scaler is not None else optimizer.step()\nif scaler is not None: scaler.update()",
    "scaler and scaler.step(optimizer)\nscaler and scaler.update()",
    "for each in [optimizer]:\n    scaler.step(each)\nscaler.update()",
    "for each in [optimizer]:\n    scaler.step(each)",
    "try:\n    scaler.step(optimizer)\nfinally:\n    scaler.update()",
    "scaler.step(optimizer)\nfinish()",
]
GROUPS = [
    "{backward}\n{clip}\n{step}",
    "{backward}\n{clip}\n{step}",
    "{backward}\nif number % 2 == 1:\n    {clip}\n    {step}\n    optimizer.zero_grad()",
    "{backward}\n{clip}\nif number % 2 == 1:\n    {step}\n    optimizer.zero_grad()",
    "if scaler is not None:\n    {backward}\n    {clip}\n    {step}\nelse:\n    loss.backward()\n    optimizer.step()",
    "if AMP:\n    {backward}\n    {clip}\n    {step}\nelse:\n    loss.backward()\n    optimizer.step()",
    "for half in (0, 1):\n    loss = model(x[half : half + 1]).sum()\n    {backward}\n{clip}\n{step}",
    "for half in (0, 1):\n    loss = model(x[half : half + 1]).sum()\n    {backward}\n    {clip}\n{step}",
    "try:\n    {backward}\n    {clip}\n    {step}\nexcept RuntimeError:\n    continue",
    "try:\n    {backward}\n    {clip}\n    {step}\nfinally:\n    seen = number",
    "with torch.enable_grad():\n    {backward}\n    {clip}\n{step}",
    "with torch.enable_grad():\n    {backward}\n    {clip}\n    {step}",
    "match number:\n    case 9:\n        pass\n    case _:\n        {backward}\n        {clip}\n        {step}",
    "{backward}\nif number == 2: continue\n{clip}\n{step}",
]
STEP = "{zero}\nloss = model(x).pow(2).sum()\n{group}"
PLACES = [
    "{scaler}\nfor number, x in enumerate(batches):\n    {body}",
    "def train():\n    {scaler}\n    for number, x in enumerate(batches):\n        {body}\n\n\ntrain()",
    "def train(model, optimizer, scaler):\n    for number, x in enumerate(batches):\n        {body}\n\n\n"
    "{scaler}\ntrain(model, optimizer, scaler)",
    "def train(model, optimizer, scaler):\n    for number, x in enumerate(batches):\n        {body}\n\n\n"
    "{scaler}\ntrain(model, optimizer, scaler)\nif not AMP: train(model, optimizer, NoScaler())",
    "{scaler}\n\n\ndef train():\n    for number, x in enumerate(batches):\n        {body}\n\n\n"
    "if __name__ == '__main__':\n    train()",
    "def step(number, x):\n    for _ in range(1):\n        {body}\n\n\n"
    "{scaler}\nfor number, x in enumerate(batches):\n    step(number, x)",
    "{scaler}\nnumber = -1\nwhile number < 3:\n    number += 1\n    x = batches[number]\n    {body}",
]
METHOD = """\
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {scaler}

    def train(self):
        for number, x in enumerate(batches):
            {body}


trainer = Trainer(model)
{before}trainer.train()"""
HELPERS = """

def limit(model):
    clip_grad_norm_(model.parameters(), 0.1)


def finish():
    scaler.update()


"""


def filled(template, **parts):
    """A template with its parts, each line of them as far in as its name."""
    lines = []
    for line in template.split("\n"):
        name = line.strip().strip("{}")
        if line.strip() == f"{{{name}}}" and name in parts:
            margin = line[: len(line) - len(line.lstrip())]
            lines += [f"{margin}{part}" for part in parts[name].split("\n") if part]
        else:
            lines.append(line)
    return "\n".join(lines)


USUAL = 4  # what stands first in each list, and is half of what is taken


def script(anything):
    """A training script, as bytes; most of them have a mistake, and some are nonsense that raises."""

    def choice(options):
        return anything(options[:USUAL] if anything([True, False]) else options)

    parts = {"backward": choice(BACKWARDS), "clip": choice(CLIPS), "step": choice(STEPS)}
    group = choice(GROUPS)
    zero = "" if "zero_grad" in group else "optimizer.zero_grad()"
    body = filled(STEP, zero=zero, group=filled(group, **parts))
    scaler = choice(SCALERS)
    if choice([0, 0, 0, 1]):
        own = {"scaler": "self.scaler", "optimizer": "self.optimizer", "model": "self.model"}
        before = choice(["", "", "if not AMP: trainer.scaler = NoScaler()\n"])
        inner = "\n".join(_renamed(line, own) for line in body.split("\n"))
        made = "\n".join(_renamed(line, {"scaler": "self.scaler"}) for line in scaler.split("\n"))
        text = filled(METHOD.replace("{before}", before), scaler=made, body=inner)
    else:
        text = filled(choice(PLACES), scaler=scaler, body=body)
    return dressed(HEAD.format(amp=choice([True, True, False])) + HELPERS + text + "\n", choice)


def _renamed(line, names):
    pattern = r"(?<![\w.])(" + "|".join(names) + r")(?=[.,) ]|$)"
    return re.sub(pattern, lambda found: names[found[1]], line)


def dressed(text, choice):
    """The same script with other blanks, line ends and encodings."""
    if choice([0, 0, 1]):
        text = text.replace("    ", "\t")
    if choice([0, 0, 1]):
        text = f"# coding: latin-1\n# é\n{text}"
    text = text.rstrip("\n") if choice([0, 1]) else text
    data = text.encode("latin-1")
    return data.replace(b"\n", b"\r\n") if choice([0, 0, 1]) else data


def test_a_script_that_ran_runs_after_it_was_fixed(tmp_path, capsys):
    fixes = 0
    for number in range(rounds(10, 300)):
        before = script(random.Random(number).choice)
        error, _ = outcome(before)
        after = fixed(before, tmp_path)
        left = capsys.readouterr().out
        if after == before:
            continue
        fixes += 1
        told = f"round {number}\n{before.decode('latin-1')}\n--- becomes\n{after.decode('latin-1')}"
        error_after, weights_after = outcome(after)
        assert error is not None or error_after is None, f"{error_after}\n{told}"
        expected_error, expected = outcome(without_scaler(before))
        if error_after is None and expected_error is None and "AMP1" not in left:
            assert torch.allclose(weights_after, expected, atol=1e-6), f"trains otherwise\n{told}"
    assert fixes >= rounds(1, 40), "many scripts have something to fix"
