"""Write what ampwise leaves on disk, in small, into an archive; run with the version that is to be remembered.

    python tests/release/make_fixtures.py tests/release/fixtures/0.1.zip

What later versions read of it is in test_old_forms.py. An archive is written once, and never again.
"""

import json
import os
import platform
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import ampwise
from ampwise.cli import main as command

TRAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(6):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(3, 4)).square().mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def record(folder):
    """Of a script with a mistake in it."""
    Path("train.py").write_text(TRAIN)
    assert command(["run", "-q", "--no-timing", "-o", str(folder), "train.py"]) == 0


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def checkpoint(folder):
    """After three steps of five, of an engine with a schedule."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine = ampwise.Engine(net, optimizer, "bf16", scheduler=schedule)
    loader = [torch.full((3, 4), float(turn)) for turn in range(5)]
    with ampwise.Guard(engine, folder, signals=()) as guard:
        for x in guard.batches(loader):
            if guard.step(lambda x: net(x).square().mean(), x).number == 3:
                break
        guard.save()


def capsule(folder):
    """Of a step that overflows."""
    net = model()
    capsules = ampwise.Capsules(folder)
    engine = ampwise.Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32", callbacks=[capsules])
    engine.step(lambda x: (net(x) * 1e38 * 1e38).sum(), torch.ones(3, 4))
    assert engine.findings


def policy(folder):
    folder.mkdir()
    made = ampwise.Policy("bf16").keep("fp32", "*.router", "lm_head")
    (folder / "policy.json").write_text(json.dumps(made.as_dict()))


def search(folder):
    folder.mkdir()
    net = nn.Sequential(model(), nn.Linear(2, 1))
    batches = [(torch.ones(3, 4),), (torch.rand(3, 4),)]
    found = ampwise.search(lambda x: net(x).square().mean(), batches, formats=["bf16", "fp32"], tolerance=0.1)
    found.save(folder / "found.json")


def main(archive):
    torch.manual_seed(0)
    random.seed(0)
    platform.platform = lambda: "somewhere"  # nothing of this machine is kept
    platform.node = socket.gethostname = lambda: "somewhere"
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        target = Path("kept")
        for make in (record, checkpoint, capsule, policy, search):
            make(target / make.__name__)
        (target / "checkpoint" / "lock").unlink(missing_ok=True)
        shutil.make_archive(str(archive.with_suffix("")), "zip", target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
