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
SETTINGS = """
from dataclasses import dataclass

@dataclass
class Settings:
    amp_dtype: str = "bf16"

def settings():
    return Settings()
"""
BF16_BY_SETTINGS = """
import torch
from settings import settings

def train(model, optimizer, loader):
    args = settings()
    dtype = torch.bfloat16 if args.amp_dtype == "bf16" else torch.float16  # expect: AMP303
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
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
EVALUATES_BY_AN_OBJECT = """
import torch

class Accuracy:
    def __call__(self, net, loader):
        correct = 0
        for x, y in loader:
            correct += net(x).argmax(1).eq(y).sum()  # expect: AMP501
        return correct

@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    measure = Accuracy()
    return measure(net, loader)
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

KEEPS = """
import torch

class Base:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def fit(self, loader):
        for epoch in range(3):
            self.train_epoch(loader)
            self.keep(epoch)

    def keep(self, epoch):
        state = {{"epoch": epoch, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}}{expect}
        torch.save(state, "last.pt")
"""
LEARNS = """
import torch
from base import Base

class Learner(Base):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.scaler = torch.amp.GradScaler("cuda")

    def train_epoch(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = self.model(x).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
LEARNS_AND_KEEPS = (
    LEARNS
    + """
    def keep(self, epoch):
        super().keep(epoch)
        torch.save(self.scaler.state_dict(), "scaler.pt")
"""
)
CALLED_SCALER = """
import torch

class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda"){expect}

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()
"""
SHARDS = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from misc import NativeScaler

def train(model, loader):
    model = {wrap}(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    loss_scaler = NativeScaler()
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x).sum()
        loss_scaler(loss, optimizer)
        schedule.step()  # expect: AMP114
"""
SHARDS_IN_A_HELPER = """
import torch
from sharding import wrapped

class Trainer:
    def __init__(self, model, loader, is_fsdp):
        self.model = wrapped(model) if is_fsdp else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda"){expect}
        self.loader = loader

    def fit(self):
        for x in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = self.model(x).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
WRAPS = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

def wrapped(model):
    model = {wrap}(model)
    return model
"""


CASES = {
    "a model sharded by a helper": {
        "sharding.py": WRAPS.format(wrap="FSDP"),
        "train.py": SHARDS_IN_A_HELPER.format(expect="  # expect: AMP309"),
    },
    "a model sharded by a helper into DTensors": {
        "sharding.py": WRAPS.format(wrap="fully_shard"),
        "train.py": SHARDS_IN_A_HELPER.format(expect=""),
    },
    "a base class saves": {"base.py": KEEPS.format(expect="  # expect: AMP204"), "learner.py": LEARNS},
    "a base class saves, the scaler elsewhere": {"base.py": KEEPS.format(expect=""), "learner.py": LEARNS_AND_KEEPS},
    "an FSDP model and a plain scaler in another file": {
        "misc.py": CALLED_SCALER.format(expect="  # expect: AMP309"),
        "train.py": SHARDS.format(wrap="FullyShardedDataParallel"),
    },
    "a plain scaler in another file": {
        "misc.py": CALLED_SCALER.format(expect=""),
        "train.py": SHARDS.format(wrap="torch.nn.DataParallel"),
    },
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
    "evaluated by an object of a helper, after the training": {
        "train.py": train("from val import evaluate", save="model.train()") + "    evaluate(model, loader)\n",
        "val.py": EVALUATES_BY_AN_OBJECT,
    },
    "evaluated by a helper under autocast": {
        "train.py": train(
            "from val import evaluate", save='with torch.autocast("cuda"):\n            evaluate(model, loader)'
        ),
        "val.py": EVALUATES_ITSELF.replace("  # expect: AMP501", ""),
    },
    "scaler of a builder in BF16": {"builder.py": BUILDS, "train.py": IN_A_BUILDERS_BF16},
    "BF16 by the default of the importer": {"engine.py": ONE_EPOCH, "main.py": BF16_BY_DEFAULT},
    "BF16 by the default of imported settings": {"train.py": BF16_BY_SETTINGS, "settings.py": SETTINGS},
    "FP16 by the default of imported settings": {
        "train.py": BF16_BY_SETTINGS.replace("  # expect: AMP303", ""),
        "settings.py": SETTINGS.replace("bf16", "fp16"),
    },
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


def test_the_evaluation_of_a_file_that_is_only_imported_is_reported_at_its_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.py").write_text(EVALUATES_ITSELF)
    plain, wrapped = (
        "model.train(), evaluate(model, loader)",
        'with torch.autocast("cuda"):\n            evaluate(model, loader)',
    )
    for name, call in (("train.py", plain), ("wraps.py", wrapped)):
        (tmp_path / name).write_text(train("from val import evaluate", save=call))
    rules = RuleSelection(SettingsByFolder(), SelectorLayer(select=("AMP501",)))
    found = [finding for path in ("train.py", "wraps.py") for finding in check_paths([path], rules, jobs=1)[0].findings]
    assert [(finding.place.file, finding.place.line) for finding in found] == [("train.py", 14)]
    assert found[0].message.endswith("(in val.py:9:20)")


TWO_STEPS = """
import torch
from norms import norm

def train(model, optimizer, scaler, loader, halves):
    for x in loader:
        optimizer.zero_grad()
        if halves:
            scaler.scale(model(x) / 2).backward()
            print(norm(model.parameters()))
        else:
            scaler.scale(model(x)).backward()
            print(norm(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
"""
NORM = """
def norm(parameters):
    return sum(p.grad.norm() ** 2 for p in parameters) ** 0.5
"""


def test_each_call_of_a_helper_that_is_only_imported_is_reported_with_its_own_backward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "norms.py").write_text(NORM)
    (tmp_path / "train.py").write_text(TWO_STEPS)
    report, _ = check_paths(["train.py"], RuleSelection(SettingsByFolder(), SelectorLayer(select=("AMP102",))), jobs=1)
    assert [(found.place.line, found.message.partition("from ")[2]) for found in report.findings] == [
        (10, "line 9 (in norms.py:3:16)"),
        (13, "line 12 (in norms.py:3:16)"),
    ]


def test_a_rule_may_have_its_words_in_what_a_file_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(
        "def apply(loss, scaler, optimizer, scheduler):\n    optimizer.zero_grad()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    scheduler.step()\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom steps import apply\n\ndef train(model, optimizer, scheduler, loader):\n"
        "    scaler = torch.amp.GradScaler('cuda')\n    for x in loader:\n        with torch.autocast('cuda'):\n"
        "            loss = model(x).mean()\n        apply(loss, scaler, optimizer, scheduler)\n"
    )
    rules = RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("AMP114",)))
    [finding] = check_paths(["train.py"], rules, jobs=1)[0].findings
    assert (finding.place.file, finding.place.line) == ("train.py", 9)


def test_a_finding_in_a_helper_names_the_loop_that_calls_it(tmp_path, monkeypatch):
    """Nothing accumulates in the helper itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("def run(loss, loss_scaler):\n    loss_scaler.scale(loss).backward()\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom helper import run\n\ndef train(model, optimizer, loader, n):\n"
        "    scaler = torch.amp.GradScaler('cuda')\n    for i, (x, y) in enumerate(loader):\n"
        "        with torch.autocast('cuda'):\n            loss = (model(x) - y).square().mean()\n"
        "        run(loss, scaler)\n        if (i + 1) % n == 0:\n"
        "            scaler.step(optimizer)\n            scaler.update()\n            optimizer.zero_grad()\n"
    )
    report, _ = check_paths(["."], RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("AMP205",))))
    [finding] = report.findings
    assert (finding.place.file, finding.place.line) == ("helper.py", 2)
    assert "in the loop of line 6 of train.py" in finding.message
    assert "`loss_scaler.scale(loss / n).backward()`." in finding.fix
    assert finding.fix.endswith("No automatic fix: the loop is in another function.")
    assert (finding.evidence["loop"]["file"], finding.evidence["loop"]["line"]) == ("train.py", 6)


SCALERS = """
import torch
import torch.amp as amp

class GradScaler(amp.GradScaler):
    def step(self, optimizer, *args, **kwargs):
        if self._enabled:
            return super().step(optimizer, *args, **kwargs)
        good = True
        for p in optimizer.param_groups[0]["params"]:
            if torch.isnan(p.grad).any():
                good = False
        if good:
            return optimizer.step()
"""
BY_ITS_SCALER = """
import torch
from scalers import GradScaler

class Trainer:
    def __init__(self, model, optimizer, enabled):
        self.model, self.optimizer, self.enabled = model, optimizer, enabled
        self.scaler = None

    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.amp.autocast("cuda", enabled=self.enabled):
                loss = self.model(x).sum()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            if not self.skips():
                self.scaler.step(self.optimizer)
            self.scaler.update()

    def skips(self):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0) > 100

    def begin(self):
        self.scaler = GradScaler("cuda", enabled=self.enabled)
"""


def test_a_scaler_of_the_script_s_own_may_step_without_the_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scalers.py").write_text(SCALERS)
    (tmp_path / "train.py").write_text(BY_ITS_SCALER)
    report, _ = check_paths(
        ["train.py"], RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("AMP109",)))
    )
    assert not report.findings


LATER = """
from torch.amp import GradScaler

class LaterScaler(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

    def update_later(self):
        self.pending = True
"""
BY_LATER = """
import torch
from scalers import LaterScaler

def train(model, optimizer, loader):
    scaler = LaterScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update_later()
"""


def test_a_scaler_class_with_an_update_of_its_own_is_not_said_to_miss_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scalers.py").write_text(LATER)
    (tmp_path / "train.py").write_text(BY_LATER)
    report, _ = check_paths(
        ["train.py"], RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("AMP105",)))
    )
    assert not report.findings
