"""Names and texts that act on a terminal, everything that ampwise reads with such in it, and what a terminal may get.

A case is what a command is called with. Cases of a command are run one after the other in one process on a terminal.
"""

import hashlib
import json
import os
import re
import shutil
import unicodedata

import torch

from ampwise.finding import Place, Rule, Severity
from ampwise.guard.disk.catalog import mark_good
from ampwise.guard.disk.writing import write_checkpoint
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from ampwise.trace.capsule import CapsuleContents, write
from ampwise.trace.capsule.capsule_files import CHECKSUM, METADATA
from ampwise.train.random_state import plain_random_state

# The title of the window; the screen cleared; a style of ours, in a combination that we never write; a bell; 8-bit
# controls; what goes back over what was written; what reorders, hides or ends lines.
ACTS = "\x1b]0;t\x07\x1b[2J\x1b[4;35m\x9b2J\x08\x7f\u202e\u2066\u200f\u200b\u2028\U000e0041"
TEXT = f"x{ACTS}\rover\nampwise: forged"
NAME = f"{TEXT}\udc9b"  # also a byte that is no UTF-8
COMMENT = f"# {ACTS}"
MARK = "@@case"

STYLE = re.compile(r"\x1b\[\d*(?:;\d+)*m")
MOVE = re.compile(r"\x1b\[(?:\?25[hl]|\?1049[hl]|H|2?K|\d*A)|\r")  # of a bar, of the live view

DRIVER = f"""
import io, json, os, sys
from ampwise.cli import main

for case in json.load(open(sys.argv[1])):
    sys.stdout.flush()
    print("\\n{MARK} " + ascii(case["words"]), flush=True)
    environment, stdin = dict(os.environ), sys.stdin
    os.environ.update(case.get("env", {{}}))
    if "stdin" in case:
        sys.stdin = io.TextIOWrapper(io.BytesIO(case["stdin"].encode("utf-8", "surrogateescape")))
    exec(case.get("setup", ""))
    try:
        main(case["words"])
    except SystemExit as leaving:
        pass
    except BaseException as error:
        print("\\n{MARK} crashed: " + ascii(error), flush=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = stdin
"""

TRAIN = f"""
import torch
from torch import nn
import torch.nn.functional as F

NAME = {TEXT.replace(".", "")!r}

def make(batch=4):
    model = nn.Sequential()
    model.add_module(NAME, nn.Linear(8, 13))  {COMMENT}
    model.add_module("two" + NAME, nn.Linear(13, 2))
    return model, (torch.randn(batch, 8), torch.randint(2, (batch,))), lambda x, y: F.cross_entropy(model(x).float(), y)

def fails(batch=4):
    raise RuntimeError(NAME)

def odd(batch=4):
    return type(NAME, (), {{}})()

def build():
    model, _, loss = make()
    return model, loss
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    optimizer.zero_grad()
    loss_fn(*batch).backward()
    optimizer.step()
"""


def rule(text=TEXT):
    """One of a plugin that is not installed here; its code and its name are checked when they are read."""
    return Rule(
        code="ACME001", name="acme-rule", severity=Severity.ERROR, summary=text, why=text, fix=text, bad=text, good=text
    )


def finding(text=TEXT):
    place = Place(file=text, line=3, module=text, parameter=text, device=text, step=7)
    return rule(text).at(place, text, evidence={text: text, "n": [text]}, fix=f"{text}\n    {text}")


# --- things to read


def sources(folder):
    """Scripts and a notebook with findings, under such names; one that cannot be read; settings."""
    folder.mkdir()
    code = f"import torch\nscaler = torch.cuda.amp.GradScaler()  {COMMENT}\nname = '{ACTS}'\n"
    (folder / f"{NAME}.py").write_text(code, encoding="utf-8")
    cell = {"cell_type": "code", "source": code, "metadata": {}, "outputs": []}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {TEXT: TEXT}, "cells": [cell]}
    (folder / f"{NAME}.ipynb").write_text(json.dumps(notebook))
    (folder / f"broken{NAME}.py").write_text(f"def (  {COMMENT}\n", encoding="utf-8")
    (folder / f"cookie{NAME}.py").write_text(f"# coding: {ACTS}\n", encoding="utf-8")
    (folder / f"{NAME}.toml").write_text(f"[tool.ampwise]\n{json.dumps(TEXT)} = {json.dumps(TEXT)}\n")
    return folder


def record(folder, text=TEXT):
    """A run, as a writer writes it; and all texts of its manifest with such in them."""
    writer = RecordWriter.create(
        folder, script=text, command=[text, "--lr", text], environment={"python": text, "host": text}
    )
    for name in ("precision", "device", "machine", text):
        writer.fact(name, text)
    for number in range(1, 6):
        writer.step(StepRow(step=number, seconds=number / 10, loss=8 / number, scale=1024.0, norm=1.25))
    writer.layers(LayerSample(first=5, last=5, scale=1024.0, layers=_censuses(text)))
    writer.findings([CountedFinding(finding=finding(text), count=3, first_step=1, last_step=3)])
    writer.close("failed", 1)
    return folder


def _censuses(text):
    from ampwise.numbers.census.algebra import Census

    fading = Census(binades={-41: 60, -20: 20}, zeros=120, amax=2**-19.5, amin=2**-40, sum_squares=1e-10)
    return {f"{text}.weight": fading, f"two{text}.bias": fading}


def capsule(folder, text=TEXT, **changes):
    model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Linear(13, 2))
    facts = {
        "args": (torch.full((4, 8), torch.inf), torch.zeros(4, dtype=torch.long)),
        "random": plain_random_state(torch.device("cpu")),
        "weights": {f"{text.replace('.', '')}.weight": model[0].weight},
        "step": 12,
        "loss": float("nan"),
        "build": "train:build",
        "findings": [finding(text)],
    }
    return write(folder, CapsuleContents(**{**facts, **changes}), True)


def checkpoints(folder, text=TEXT):
    tensors = {"w": torch.arange(300.0)}

    def save(step):
        return write_checkpoint(
            folder,
            step=step,
            live=tensors,
            staged=tensors,
            plain=None,
            about={"precision": text, "x": text},
            group=None,
        )

    saved = [save(step) for step in (100, 200, 300)]
    mark_good(saved[0])
    (saved[1].path / "mark.json").write_text(json.dumps({"good": False, "why": text}))
    os.truncate(saved[2].path / "tensors-00000.safetensors", 1000)
    (folder / f"step-{text}").mkdir()
    return folder


def poisoned(value, text=TEXT):
    """JSON with the text after each text in it, also after each name."""
    if isinstance(value, dict):
        return {f"{key}{text}" if key == "x" else key: poisoned(part, text) for key, part in value.items()}
    if isinstance(value, list):
        return [poisoned(part, text) for part in value]
    return f"{value}{text}" if isinstance(value, str) else value


def leaves(value, path=()):
    """The way to each value of JSON."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from leaves(part, (*path, key))


def copied(folder, name, file, change):
    """A copy of a folder, in which one file of JSON is changed."""
    other = folder.with_name(name)
    shutil.copytree(folder, other)
    data = json.loads((other / file).read_text())
    (other / file).write_text(json.dumps(change(data)))
    return other


def resealed(capsule):
    """A capsule of which one cannot see that it was changed: its checksum is no signature."""
    data = (capsule / METADATA).read_bytes()
    (capsule / CHECKSUM).write_text(hashlib.sha256(data).hexdigest())
    return capsule


# --- terminals


def shown(warm, cases, folder, **environment):
    """What a terminal gets of each case, by its words."""
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    environment = {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment}
    data = warm.on_terminal("-c", DRIVER, str(listed), cwd=folder, env=environment)
    first, *parts = data.split(MARK.encode())
    assert not first.strip(), first
    return [part.partition(b"\r\n") for part in parts]


def acting(data, *, moves=False):
    """What of these bytes acts on a terminal, or is no text; a line that pretends to be ours."""
    text = data.decode("utf-8", "surrogateescape").replace("\r\r\n", "\n").replace("\r\n", "\n")
    found = re.findall(r"^ampwise: forged.*|\x1b\[4;35m", text, re.MULTILINE)
    text = STYLE.sub("", text)
    text = MOVE.sub("", text) if moves else text
    return found + [
        char
        for char in text
        if char not in "\n\t" and (unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("Zl", "Zp"))
    ]
