"""Twice the code takes about twice the work, counted in calls of functions: no walk of a file for every path."""

import sys

import pytest

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.check.selectors import SelectorLayer

HEAD = "import torch\nfrom torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\nmodel = make().half()\n"
STEP = """\
    for i, (x, y) in enumerate(loader):
        with autocast(dtype=torch.float16):
            loss = criterion(model(x), y) + 1e-9
        if use_amp:
            scaler.scale(loss / n).backward()
        else:
            loss.backward()
        total = total / 3 + loss.item() / n
        if (i + 1) % n == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "x.pt")
"""
SHAPES = {
    "functions": lambda n: "".join(f"def train_{i}(loader, optimizer, n, clip):\n{STEP}" for i in range(n)),
    "loops": lambda n: f"def train(loader, optimizer, n, clip):\n{STEP * n}",
    "calls of one helper": lambda n: (
        f"def train(loader, optimizer, n):\n{STEP}def main():\n" + "    train(a, b, 4)\n" * n
    ),
    "backwards in one loop": lambda n: (
        "def train(loader, optimizer):\n    for x in loader:\n"
        + "".join(f"        scaler.scale(model(x) / {i}).backward()\n" for i in range(n))
        + "        scaler.step(optimizer)\n        scaler.update()\n"
    ),
    "conditions in one loop": lambda n: (
        "def train(loader, optimizer):\n    for x in loader:\n"
        + "".join(f"        if flag_{i}:\n            scaler.scale(model(x) / {i}).backward()\n" for i in range(n))
        + "        scaler.step(optimizer)\n        scaler.update()\n"
    ),
    "classes": lambda n: "".join(
        f"class T{i}(B):\n    def __init__(self):\n        self.scaler = GradScaler()\n"
        f"    def train(self, loader, optimizer, n, clip):\n"
        + STEP.replace("    ", "     ").replace("scaler", "self.scaler")
        for i in range(n)
    ),
    "plain lines": lambda n: (
        f"def train(loader, optimizer, n, clip):\n{STEP}" + "y = f(x) / 2 + g(x, -1e9)\n" * (10 * n)
    ),
}


def calls_to_check(text):
    choice = RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("ALL",)))
    check_text(HEAD + text, "train.py", choice)  # what is computed once
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        check_text(HEAD + text, "train.py", choice)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_size_of_a_file(shape):
    small, large = (calls_to_check(SHAPES[shape](n)) for n in (6, 18))
    assert large < 5 * small  # three times the code; a walk of the file for each part would make it nine
