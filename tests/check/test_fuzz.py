"""Whatever the text, the linter answers: never an exception, and findings that lie within the file.

80 texts of each kind; AMPWISE_FUZZ=10000 for more.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import CheckTask, RuleSelection, check_text, check_texts
from ampwise.check.selectors import SelectorLayer
from ampwise.check.source.script import UnreadableFile, decode_source, script_from_text
from ampwise.check.verified_fixes import fix_findings

EXAMPLES = int(os.environ.get("AMPWISE_FUZZ", "80"))
FIXTURES = Path(__file__).parent.parent / "rules" / "source" / "fixtures"
SAMPLES = [
    """
import torch
from torch.cuda.amp import GradScaler, autocast

class Trainer:
    def __init__(self, args):
        self.scaler = GradScaler(enabled=args.amp)
        self.optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)

    def step(self, i, x):
        with autocast(dtype=torch.float16):
            loss = self.model(x).masked_fill(mask, -1e9).exp().log().mean()
        self.scaler.scale(loss / 4).backward()
        if (i + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
""",
    """
scaler = torch.amp.GradScaler("cuda") if args.amp else None
for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad() as g:
            loss = nn.BCELoss()(torch.sigmoid(model(x)), y)
        if scaler is not None:
            scaler.scale(loss).backward(); scaler.unscale_(optimizer)
            scaler.step(optimizer), scaler.update()
        else:
            loss.backward()
            optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{epoch}.pt")
""",
    "@custom_fwd\nasync def f(*a, b=(yield), **k): return [await x async for x in y if (z := x.half())]\n",
    "match x:\n    case {'amp': GradScaler() as s, **rest} if s: s.step(o)\n    case [*_]: pass\n",
    '{"nbformat": 4, "cells": [{"cell_type": "code", "source": ["%time scaler.step(o)\\n", "!ls"]}]}',
]


def sources():
    found = sorted(FIXTURES.glob("*.py")) if FIXTURES.is_dir() else []
    return [*SAMPLES, *(path.read_text() for path in found)]


@st.composite
def mutated(draw):
    """A real source after a few accidents."""
    lines = draw(st.sampled_from(sources())).split("\n")
    for _ in range(draw(st.integers(1, 4))):
        if not lines:
            break
        one, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        accident = draw(st.sampled_from(["delete", "duplicate", "swap", "indent", "dedent", "cut", "truncate", "join"]))
        if accident == "delete":
            del lines[one]
        elif accident == "duplicate":
            lines.insert(other, lines[one])
        elif accident == "swap":
            lines[one], lines[other] = lines[other], lines[one]
        elif accident == "indent":
            lines[one] = f"    {lines[one]}"
        elif accident == "dedent":
            lines[one] = lines[one].removeprefix("    ")
        elif accident == "cut":
            lines[one] = lines[one][: draw(st.integers(0, len(lines[one])))]
        elif accident == "truncate":
            lines = lines[: one + 1]
        else:
            lines[one : one + 2] = ["; ".join(line.strip() for line in lines[one : one + 2])]
    return draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines)


@pytest.fixture(scope="module")
def choice():
    return RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("ALL",)))


@pytest.fixture(autouse=True)
def raising(monkeypatch):
    monkeypatch.setenv("AMPWISE_DEBUG", "1")


def fuzz(test):
    return settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))(test)


def checked(text, path, choice):
    """The report of a text; its findings must lie in it, and mending it must leave it readable."""
    report, task = check_text(text, path, choice)
    assert report.files_checked + len(report.unreadable) == 1
    if report.findings:
        script = script_from_text(text, path)
        for finding in report.findings:
            assert 1 <= script.line_of(finding.place) <= len(script.lines)
        mend_to_the_end(report, task)
    return report


def mend_to_the_end(report, task):
    repairs = fix_findings(report.findings, task, unsafe=True)
    refused = (" not fixed: the fix would cause AMP", " not fixed: the fix would not remove the finding")
    assert [note for note in repairs.notes if not any(reason in note for reason in refused)] == []
    for path, change in repairs.files.items():
        text = change.before.file_text(change.text)
        again = check_texts(CheckTask(task.project_paths, task.codes, {path: text}))
        assert again.unreadable == []
        left = [str(found.place) for found in again.findings if found.edits]
        assert [place for place in left if not any(note.startswith(f"{place}: ") for note in repairs.notes)] == []


@fuzz
@given(st.text())
def test_any_text(choice, text):
    checked(text, "a.py", choice)


@fuzz
@given(st.binary(), st.sampled_from(["a.py", "a.ipynb"]))
def test_any_bytes(choice, data, path):
    try:
        text = decode_source(data, path)
    except UnreadableFile:
        return
    checked(text, path, choice)


@fuzz
@given(mutated(), st.sampled_from(["a.py", "a.py", "a.py", "a.ipynb"]))
def test_mutated_sources(choice, text, path):
    checked(text, path, choice)


@pytest.mark.parametrize("source", [sample for sample in SAMPLES if not sample.startswith("{")])
def test_the_samples_themselves_are_read(choice, source):
    assert checked(source, "a.py", choice).files_checked == 1
