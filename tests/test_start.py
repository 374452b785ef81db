"""What a start of ``ampwise check`` loads: nothing that costs more than it gives. Time itself is not measured."""

import subprocess
import sys

import pytest

from ampwise.finding.registry import source_rules

AMP_SCRIPT = """
import torch
from torch.amp import GradScaler, autocast

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = GradScaler("cuda")
for inputs in torch.randn(10, 8, 8, device="cuda"):
    optimizer.zero_grad()
    with autocast("cuda"):
        loss = model(inputs).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
"""
# Libraries, and what of the standard library takes milliseconds or is for what few runs do.
HEAVY = {
    *("torch", "numpy", "rich", "rich_argparse"),
    *("pathlib", "urllib", "ipaddress", "shutil", "bz2", "lzma", "pkgutil"),
    *("difflib", "fnmatch", "json", "tomllib", "logging", "subprocess", "multiprocessing", "concurrent"),
    *("importlib.metadata", "importlib.util", "unicodedata", "tempfile", "datetime"),
}


def loaded_by(code, *words):
    """The modules that ``code`` loads beyond what argparse and ast, which the linter cannot do without, do."""
    script = f"import argparse, ast, sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def loaded_by_check(folder, text):
    file = folder / "train.py"
    file.write_text(text)
    return loaded_by("from ampwise.cli import main\nmain(['check', '--isolated', sys.argv[1]])", str(file))


@pytest.mark.parametrize("text", [AMP_SCRIPT, "import math\n\nprint(math.pi)\n"], ids=["AMP", "plain"])
def test_a_check_loads_nothing_heavy(tmp_path, text):
    loaded = loaded_by_check(tmp_path, text)
    assert "ampwise.check.linter" in loaded
    assert not loaded & HEAVY


def test_a_check_loads_the_rules_about_source_alone(tmp_path):
    loaded = loaded_by_check(tmp_path, AMP_SCRIPT)
    assert "ampwise.rules.amp1xx_order.clip_scaled_grads" in loaded
    about_source = {module.__name__ for module in source_rules()}
    of_runs = {name for name in loaded if name.startswith(("ampwise.rules.amp6", "ampwise.rules.amp9"))}
    assert {name for name in of_runs if name.count(".") == 3} <= about_source


def test_no_rule_about_source_loads_anything_heavy():
    modules = [module.__name__ for module in source_rules()]
    loaded = loaded_by(f"import {', '.join(modules)}")
    assert loaded >= set(modules)
    assert not loaded & HEAVY, "see how the other rules do without it"


def test_these_tests_can_fail():
    assert loaded_by("import tempfile, json") & HEAVY >= {"tempfile", "json"}
