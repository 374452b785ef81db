"""Laws of fixing: the result parses, has no new finding, is final, and raises no error that was not there before.

The shapes are those in which people write a training step. Each is run before and after its fixes, with AMP on and off.
"""

import ast
import collections
import json
import textwrap

import pytest
import torch

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.check.selectors import SelectorLayer
from ampwise.check.verified_fixes import fix_findings
from ampwise.finding.registry import source_rules

from .running import outcome
from .test_fixtures import FIXED, FIXTURES

ALL = RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("ALL",)))

HEAD = """\
import contextlib
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

AMP = True
model = torch.nn.Linear(3, 1)
other = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
batches = [torch.ones(2, 3) * i for i in range(4)]
scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if AMP else None


def loss_of(out, target):
    return ((out - target) ** 2).mean()


"""
# The clip, or whatever the finding is about, with everything around that decides whether its fix is right.
SHAPES = """
# clip between two branches
for x in batches:
    optimizer.zero_grad()
    loss = model(x).sum()
    scaler.scale(loss).backward() if AMP else loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    if AMP:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
---
# two clips between two branches that ask for the scaler
for x in batches:
    optimizer.zero_grad()
    loss = model(x).sum()
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    clip_grad_value_(model.parameters(), 0.1)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
---
# clip between two branches, the scaler in the second ones
for x in batches:
    optimizer.zero_grad()
    loss = model(x).sum()
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
---
# clip in each branch
for x in batches:
    optimizer.zero_grad()
    if AMP:
        with torch.autocast("cpu"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    else:
        model(x).sum().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
---
# backward and clip in one branch, the step in another
for i, x in enumerate(batches):
    optimizer.zero_grad()
    loss = model(x).sum()
    if AMP:
        scaler.scale(loss).backward()
        if i > 1:
            clip_grad_norm_(model.parameters(), 0.1)
        clip_grad_value_(model.parameters(), 0.1)
    else:
        loss.backward()
    if AMP:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
---
# clip in every micro-batch
for i, x in enumerate(batches):
    loss = model(x).sum() / 2
    if AMP:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    if (i + 1) % 2 == 0:
        if AMP:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
---
# clip at the end of the micro-batches
for i, x in enumerate(batches):
    loss = model(x).sum() / 2
    scaler.scale(loss).backward() if AMP else loss.backward()
    if (i + 1) % 2 == 0:
        if i > 0: clip_grad_norm_(model.parameters(), 0.1)
        if AMP: scaler.step(optimizer); scaler.update()
        else: optimizer.step()
        optimizer.zero_grad()
---
# a clip that skips the step if the norm is too large
for x in batches:
    optimizer.zero_grad()
    loss = model(x).sum()
    scaler.scale(loss).backward() if AMP else loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    if norm > 20:
        continue
    if AMP:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
---
# the flag changes between clip and step
for x in batches:
    optimizer.zero_grad()
    on = AMP
    loss = model(x).sum()
    scaler.scale(loss).backward() if AMP else loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    on = AMP and x.sum() > 1
    if on:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
---
# a step that is caught
for i, x in enumerate(batches):
    try:
        optimizer.zero_grad()
        loss = model(x).sum()
        scaler.scale(loss).backward() if AMP else loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        if i == 1:
            raise ValueError
        if AMP:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    except ValueError:
        pass
---
# one clip for each of two optimizers
for x in batches:
    optimizer.zero_grad(), second.zero_grad()
    loss = (model(x) + other(x)).sum()
    scaler.scale(loss).backward() if AMP else loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    clip_grad_norm_(other.parameters(), 0.1)
    if AMP:
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
    else:
        optimizer.step()
        second.step()
---
# in a class
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu") if AMP else None

    def step(self, x):
        optimizer.zero_grad()
        loss = model(x).sum()
        if self.scaler:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

trainer = Trainer()
for x in batches:
    trainer.step(x)
---
# the whole step in autocast
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", enabled=AMP):
        loss = model(x).sum()
        # This is the step.
        if AMP:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if loss.item() > 100:
            continue
        # end
    done = x
---
# the rest of the loop in autocast
ctx = torch.autocast("cpu") if AMP else contextlib.nullcontext()
total = 0.0
for x in batches:
    optimizer.zero_grad()
    with ctx:
        loss = model(x).sum(); loss.backward()
        optimizer.step()
        total += loss.item(
        )
        print('''
        total''', total, \\
            "of all")
        error = loss_of(model(x).detach(), x)
---
# all on one line
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", enabled=AMP): loss = model(x).sum(); loss.backward(); optimizer.step()
---
# another forward pass after the backward
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        h = model(x)
        h.sum().backward(retain_graph=True)
        loss = (h.float() @ torch.ones(1, 1, dtype=h.dtype)).sum()
        loss.backward()
        y = h.detach() @ torch.ones(1, 1)
        optimizer.step()
---
# a logarithm and a metric in autocast, after the step
class Metric:
    def update(self, out, target):
        self.error = (out @ torch.ones(1, 1)).sum()

metric = Metric()
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        out = model(x)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        metric.update(out, x)
        bits = torch.log(loss.detach())
---
# loss and backward in one expression
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        loss_of(model(x), x).backward()
        optimizer.step()
---
# the loop in autocast
with torch.autocast("cpu", enabled=AMP):
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
---
# other contexts
for x in batches:
    optimizer.zero_grad()
    with torch.enable_grad(), torch.autocast("cpu"):
        loss = model(x).sum()
        loss.backward()
    with torch.autocast("cpu"):
        with torch.set_grad_enabled(True):
            loss = model(x).sum()
            loss.backward()
        optimizer.step()
---
# a step without update, or with none of the scaling
scaler = torch.amp.GradScaler("cpu", enabled=AMP)
for x in batches[:1]:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
---
# nothing is scaled
scaler = torch.amp.GradScaler("cpu", enabled=AMP)
scaler.scale(torch.ones(1))
for x in batches:
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
---
# undivided
n = 2
scaler = torch.amp.GradScaler("cpu", enabled=AMP)
for i, x in enumerate(batches):
    loss = model(x).mean()
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
---
# old names
from torch.cuda.amp import GradScaler, autocast
scaler = GradScaler(enabled=False)
for x in batches:
    optimizer.zero_grad()
    with autocast(False, torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
# Shapes that must not change, even with unsafe fixes: the edit would be wrong, or there is none.
LEFT = (
    *("clip in every micro-batch", "a clip that skips the step if the norm is too large"),
    *("the flag changes between clip and step", "one clip for each of two optimizers"),
    *("the rest of the loop in autocast", "another forward pass after the backward"),
    *("loss and backward in one expression", "the loop in autocast", "other contexts"),
)
# Those that change only with unsafe fixes.
UNSAFE = ("a step that is caught", "undivided", "a logarithm and a metric in autocast, after the step")
SHAPES = {shape.strip().partition("\n")[0].lstrip("# "): shape for shape in SHAPES.split("---\n")}
LAYOUTS = {
    "spaces": lambda text: text.encode(),
    "tabs": lambda text: text.replace("    ", "\t").encode(),
    "carriage returns": lambda text: text.replace("\n", "\r\n").encode(),
    "another encoding": lambda text: b"\xef\xbb\xbf" + text.replace("# This is", "# Größe: this is").encode(),
}


def fixed(text, unsafe, path="train.py"):
    """The text with its fixes, and the findings before and after."""
    report, task = check_text(text, path, ALL)
    fixes = fix_findings(report.findings, task, unsafe=unsafe)
    change = fixes.files.get(path)
    if change is None:
        return text, report.findings, report.findings
    after = ("\ufeff" if change.before.bom else "") + change.before.file_text(change.text)
    return after, report.findings, check_text(after, path, ALL)[0].findings


def assert_laws_hold(text, unsafe):
    after, old, new = fixed(text, unsafe)
    ast.parse(after.removeprefix("\ufeff"))
    codes = [collections.Counter(finding.rule.code for finding in found) for found in (old, new)]
    assert not codes[1] - codes[0], "a new finding"
    assert (after == text) is (codes[0] == codes[1])
    assert fixed(after, unsafe)[0] == after, "a second run changes more"
    return after


@pytest.mark.half_by_day
@pytest.mark.parametrize("unsafe", [False, True], ids=["safe", "unsafe"])
@pytest.mark.parametrize("path", [*FIXTURES, *FIXED], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_fixed_fixtures(path, unsafe):
    assert_laws_hold(path.read_text(), unsafe)


@pytest.mark.parametrize("unsafe", [False, True], ids=["safe", "unsafe"])
def test_fixed_examples(unsafe):
    for module in source_rules():
        for text in (module.RULE.bad, module.RULE.good):
            loop = textwrap.indent(text, "    ")
            assert_laws_hold(f"import torch\nimport torch.nn.functional as F\nfor i, x in loader:\n{loop}\n", unsafe)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # By day each shape as it stands, and in one of the other layouts by turns.
        pytest.param(name, layout, marks=[pytest.mark.nightly] * (place > 0 and (number + place) % 3 > 0))
        for number, name in enumerate(SHAPES)
        for place, layout in enumerate(LAYOUTS)
    ],
)
def test_a_fixed_shape_raises_no_new_error_in_any_mode(name, layout):
    data = LAYOUTS[layout](HEAD + SHAPES[name])
    text = data.decode()
    after = assert_laws_hold(text, unsafe=False)
    assert (after == text) is (name in (*LEFT, *UNSAFE))
    for mode in (b"AMP = True", b"AMP = False") if layout == "spaces" or after != text else ():
        before_outcome, after_outcome = (outcome(each.replace(b"AMP = True", mode)) for each in (data, after.encode()))
        assert after_outcome[0] in (None, before_outcome[0])
        if mode == b"AMP = False" and after_outcome[0] is None:
            assert torch.equal(before_outcome[1], after_outcome[1]), "FP32 is as it was"
    if layout == "spaces":
        assert (assert_laws_hold(text, unsafe=True) == text) is (name in LEFT)


def test_a_notebook_is_fixed_within_its_cells():
    name = "the whole step in autocast"
    lines = SHAPES[name].strip().splitlines(keepends=True)
    cells = [
        HEAD.splitlines(keepends=True),
        [*lines[:-3], lines[-3].rstrip()],
        ["    # another cell"],
        ["%time done = x"],
    ]
    book = {"nbformat": 4, "cells": [{"cell_type": "code", "metadata": {}, "source": source} for source in cells]}
    after, old, new = fixed(json.dumps(book, indent=1), False, "train.ipynb")
    sources = [cell["source"] for cell in json.loads(after)["cells"]]
    assert (sources[0], sources[2:]) == (cells[0], cells[2:])
    assert [finding.rule.code for finding in old if finding not in new] == ["AMP111"]
    assert "".join(sources[1]) == fixed(HEAD + "".join(cells[1]), False)[0].removeprefix(HEAD)
