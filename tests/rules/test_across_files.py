"""Mistakes that no file shows alone: the scaled backward in one, the clip in another."""

import re

import pytest

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_paths
from ampwise.check.selectors import SelectorLayer

TRAIN = """
import torch
{imports}

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = {loss}
            scaler.scale(loss).backward()
            {step}
        {save}
"""
STEP = "scaler.step(optimizer); scaler.update()"


def train(imports, loss="model(x, y)", step=STEP, save="pass"):
    return TRAIN.format(imports=imports, loss=loss, step=step, save=save)


CLIPS = """
import torch

def apply(model, optimizer, scaler):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: AMP101
    scaler.step(optimizer)
    scaler.update()
"""
UNSCALES = CLIPS.replace("    torch", "    scaler.unscale_(optimizer)\n    torch").replace("  # expect: AMP101", "")
SAVES = """
import torch

def keep(path, model, optimizer, **more):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # expect: AMP204
"""
SAVES_MORE = SAVES.replace("()}", "(), **more}").replace("  # expect: AMP204", "")
SAVES_AND_MORE = (
    SAVES_MORE
    + """
@torch.no_grad()
def classify(model, pictures):  # in full precision: no autocast
    for picture in pictures:
        yield model(picture).argmax(1)
"""
)
WRITES = """
import torch

def write(state, path):
    torch.save(state, path)
"""
PLAIN = """
import torch
import helpers

def train(model, optimizer, loader):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    helpers.write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "x.pt")
"""
LOSS = """
import torch
import torch.nn.functional as F

class ProbabilityLoss(torch.nn.Module):
    def forward(self, logits, target):
        return F.binary_cross_entropy(torch.sigmoid(logits), target)  # expect: AMP402
"""
LOSS_WITH_LOGITS = """
import torch
import torch.nn.functional as F

class LogitLoss(torch.nn.Module):
    def forward(self, logits, target):
        return F.binary_cross_entropy_with_logits(logits, target)
"""
BASE = """
import torch

class Base:
    def fit(self, loader):
        for batch in loader:
            loss = self.compute(batch)
            self.backward(loss)
            self.clip()
            self.apply()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # expect: AMP101
"""
SCALED = """
import torch
from base import Base

class Scaled(Base):
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def compute(self, batch):
        with torch.autocast("cuda"):
            return self.model(batch)

    def backward(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()

    def apply(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
CLIPS_ITSELF = (
    SCALED
    + """
    def clip(self):
        self.scaler.unscale_(self.optimizer)
        super().clip()
"""
)
BUILDS = """
import torch

def build(model, mixed):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if mixed else None
    return optimizer, scaler
"""
IN_A_BUILDERS_BF16 = """
import torch
from builder import build

HAS_BF16 = torch.cuda.is_bf16_supported(including_emulation=False)

def train(model, loader, name):
    if name == "bf16":
        dtype, mixed = torch.bfloat16, True
    else:
        dtype, mixed = torch.float32, False
    optimizer, scaler = build(model, mixed)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=mixed):
            loss = model(x).sum()
        if mixed:
            scaler.scale(loss).backward()  # expect: AMP302
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
ONE_EPOCH = """
import contextlib
import torch

def train_one_epoch(model, optimizer, loader, args):
    for x in loader:
        optimizer.zero_grad()
        context = {
            "bf16": torch.autocast("cuda", dtype=torch.bfloat16),  # expect: AMP303
            "tf32": contextlib.nullcontext(),
        }[args.precision]
        with context:
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
BF16_BY_DEFAULT = """
import argparse
from engine import train_one_epoch

def main(model, optimizer, loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    args = parser.parse_args()
    for _ in range(3):
        train_one_epoch(model, optimizer, loader, args)
    optimizer.scaler = None
"""
EVALUATES_ITSELF = """
import torch

@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = 0
    for x, y in loader:
        correct += model(x).argmax(1).eq(y).sum()  # expect: AMP501
    return correct
"""
LOADS_IN_BF16 = """
import torch
from transformers import AutoModelForCausalLM

def load(name):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
    return name, model.to("cuda")
"""
LOADS_WITH_ADAPTERS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

def load(name):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
    return name, get_peft_model(model, LoraConfig(r=8))
"""
MAKES_PLAIN = """
import torch

def make_optimizer(model):
    return torch.optim.AdamW([{"params": model.parameters()}], lr=1e-5)
"""
MAKES_CAREFUL = """
import torch
from rounding import CarefulAdamW

def make_optimizer(model):
    return CarefulAdamW(model.parameters(), lr=1e-5)
"""
TRAINS_LOADED = """
from loading import load
from making import make_optimizer

def main(loader):
    name, model = load("gpt2")
    optimizer = make_optimizer(model)  # expect: AMP306
    for batch in loader:
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINS_SILENTLY = TRAINS_LOADED.replace("  # expect: AMP306", "")
TASK = """
import torch
from torch import nn

class Task(nn.Module):
    def forward(self, x, y):
        return self.net(x, y)

    def before_step(self, scaler, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # expect: AMP101
"""
TASK_UNSCALES = TASK.replace("        torch.nn", "        scaler.unscale_(optimizer)\n        torch.nn").replace(
    "  # expect: AMP101", ""
)
TASK_OF_OTHERS = TASK.replace(
    "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # expect: AMP101", "        pass"
)
TASK_BY_PROTOCOL = TASK_OF_OTHERS.replace("from torch import nn", "from typing import Protocol").replace(
    "nn.Module", "Protocol"
)
SCALER_BY_PROTOCOL = """
import torch
from typing import Protocol

class Scales(Protocol):
    def scale(self, loss): ...
    def unscale_(self, optimizer): ...
    def step(self, optimizer): ...
    def update(self): ...

def train(model, loader, optimizer, scaler: Scales):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
RUNS_A_TASK = """
import torch
from task import Task

class Trainer:
    def __init__(self, make, wraps):
        self.task, self.wraps = make(), wraps
        self.scaler = torch.amp.GradScaler("cuda")

    def unwrapped(self):
        task: Task = self.task.module if self.wraps else self.task
        return task

    def train(self, loader, optimizer):
        task = self.unwrapped()
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = task(x, y)
            self.scaler.scale(loss).backward()
            task.before_step(self.scaler, optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()
"""
GETS_A_TASK = """
import torch
from task import Task

def train(task: Task, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = task(x, y)
        scaler.scale(loss).backward()
        task.before_step(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
"""

CASES = {
    "weights loaded in BF16 by a helper": {
        "loading.py": LOADS_IN_BF16,
        "making.py": MAKES_PLAIN,
        "train.py": TRAINS_LOADED,
    },
    "adapters added by a helper": {
        "loading.py": LOADS_WITH_ADAPTERS,
        "making.py": MAKES_PLAIN,
        "train.py": TRAINS_SILENTLY,
    },
    "careful optimizer of a helper": {
        "loading.py": LOADS_IN_BF16,
        "making.py": MAKES_CAREFUL,
        "train.py": TRAINS_SILENTLY,
    },
    "evaluated by a helper": {
        "train.py": train("from val import evaluate", save="model.train(), evaluate(model, loader)"),
        "val.py": EVALUATES_ITSELF,
    },
    "evaluated by a helper under autocast": {
        "train.py": train(
            "from val import evaluate", save='with torch.autocast("cuda"):\n            evaluate(model, loader)'
        ),
        "val.py": EVALUATES_ITSELF.replace("  # expect: AMP501", ""),
    },
    "scaler of a builder in BF16": {"builder.py": BUILDS, "train.py": IN_A_BUILDERS_BF16},
    "BF16 by the default of the importer": {"engine.py": ONE_EPOCH, "main.py": BF16_BY_DEFAULT},
    "BF16 by no default": {
        "engine.py": ONE_EPOCH.replace("  # expect: AMP303", ""),
        "main.py": BF16_BY_DEFAULT.replace('default="bf16"', 'default="tf32"'),
    },
    "clip in a helper": {
        "train.py": train("from ops import apply", step="apply(model, optimizer, scaler)"),
        "ops.py": CLIPS,
    },
    "unscaled in a helper": {
        "train.py": train("from ops import apply", step="apply(model, optimizer, scaler)"),
        "ops.py": UNSCALES,
    },
    "saved by a helper": {
        "train.py": train("import helpers", save='helpers.keep("x.pt", model, optimizer)'),
        "helpers.py": SAVES,
    },
    "saved by a helper that is given more": {
        "train.py": train("import helpers", save='helpers.keep("x.pt", model, optimizer, scaler=scaler.state_dict())'),
        "helpers.py": SAVES_MORE,
    },
    "helper with something else beside it": {
        "train.py": train("import helpers", save='helpers.keep("x.pt", model, optimizer, scaler=scaler.state_dict())'),
        "helpers.py": SAVES_AND_MORE,
    },
    "two scripts share a helper, one without a scaler": {
        "plain.py": PLAIN,
        "train.py": train(
            "import helpers",
            save="helpers.write({'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict()}, 'x.pt')",
        ),
        "helpers.py": WRITES,
    },
    "two scripts share a helper, the one with a scaler forgets it": {
        "plain.py": PLAIN,
        "train.py": train(
            "import helpers", save="helpers.write({'opt': optimizer.state_dict()}, 'x.pt')  # expect: AMP204"
        ),
        "helpers.py": WRITES,
    },
    "loss of another file": {
        "train.py": train("from losses import ProbabilityLoss", loss="ProbabilityLoss()(model(x), y)"),
        "losses.py": LOSS,
    },
    "fine loss of another file": {
        "train.py": train("from losses import LogitLoss", loss="LogitLoss()(model(x), y)"),
        "losses.py": LOSS_WITH_LOGITS,
    },
    "autocast around a helper of another file": {
        "train.py": (
            "import torch\nfrom nets import Net\ndef train(loader, optimizer):\n    net = Net()\n"
            "    for x in loader:\n        with torch.autocast('cuda', torch.bfloat16):  # expect: AMP303\n"
            "            loss = net(x)\n        loss.backward()\n"
            "        optimizer.step()\n        optimizer.zero_grad()\n"
        ),
        "nets.py": (
            "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        y = x * x\n"
            "        return torch.nn.functional.softmax(y, -1).float().mean()\n\n\n\n\n# as long as the other\n"
            "def step(x, optimizer):\n    with torch.autocast('cpu', torch.bfloat16):\n        loss = Net()(x)\n"
            "    loss.backward()\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n"
        ),
    },
    "hook of an annotated class clips": {"task.py": TASK, "trainer.py": RUNS_A_TASK},
    "hook of an annotated parameter clips": {"task.py": TASK, "trainer.py": GETS_A_TASK},
    "hook of an annotated class unscales": {"task.py": TASK_UNSCALES, "trainer.py": RUNS_A_TASK},
    "hook of an annotated class is empty": {"task.py": TASK_OF_OTHERS, "trainer.py": RUNS_A_TASK},
    "hook of a protocol may clip": {"task.py": TASK_BY_PROTOCOL, "trainer.py": GETS_A_TASK},
    "scaler of a protocol unscales": {"trainer.py": SCALER_BY_PROTOCOL},
    "base class clips": {"base.py": BASE, "scaled.py": SCALED},
    "base class clips what was unscaled": {
        "base.py": BASE.replace("  # expect: AMP101", ""),
        "scaled.py": CLIPS_ITSELF,
    },
}


@pytest.mark.parametrize("files", CASES.values(), ids=CASES.keys())
def test_finds_what_is_marked_and_nothing_else(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = []
    for name, text in sorted(files.items()):
        (tmp_path / name).write_text(text)
        for number, line in enumerate(text.split("\n"), 1):
            expected += [(name, number, code) for code in re.findall(r"# expect: (AMP\d+)", line)]
    report, _ = check_paths(["."], RuleSelection(SettingsByFolder(), SelectorLayer(select=("ALL",))), jobs=1)
    found = [(finding.place.file, finding.place.line, finding.rule.code) for finding in report.findings]
    assert found == expected
