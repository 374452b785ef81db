"""Fixes as diffs: applied to the script as it ran, they leave the linter nothing to say of that finding."""

import re
import runpy
import time
from pathlib import Path

import pytest

from ampwise.check.linter import CheckTask, check_texts
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding
from ampwise.runs.writer import RecordWriter
from ampwise.watch import fix_diffs as fixes
from ampwise.watch.fix_diffs import add_diffs
from ampwise.watch.watch import Watch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _all_the_time(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(fixes, "SECONDS", 600.0)


HEAD = """import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

"""
CLIP = (
    HEAD
    + """
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(
        model.parameters(),
        1.0,
    )
    scaler.step(optimizer)
    scaler.update()
"""
)
BACKWARD = (
    HEAD
    + """
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
"""
)
UPDATE = (
    HEAD
    + """
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
"""
)
ACCUMULATED = (
    HEAD
    + """
n = 4
for i in range(16):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)


def run_watched(path, folder):
    """The findings of a script that is run here, as its record has them."""
    with Watch(RecordWriter.create(folder / "run"), timing=False) as watch:
        try:
            runpy.run_path(str(path))
        except (AssertionError, RuntimeError) as error:  # torch's own, for a scaler that was driven wrongly
            watch.died(error)
    assert not watch.failures
    return Run.read(folder / "run").findings


def linted(text, code, file="train.py"):
    task = CheckTask((file,), {file: frozenset([code])}, {file: text})
    return [finding for finding in check_texts(task).findings if finding.rule.code == code]


def applied(diff, text):
    """The text after a unified diff, whose context must be there to the letter."""
    lines, found, reached = text.split("\n"), [], 0
    for row in diff.splitlines()[2:]:
        if hunk := re.match(r"@@ -(\d+)", row):
            found += lines[reached : int(hunk[1]) - 1]
            reached = int(hunk[1]) - 1
        elif row.startswith("+"):
            found.append(row[1:])
        elif not row.startswith("\\"):
            assert lines[reached] == row[1:]
            found += [row[1:]] * row.startswith(" ")
            reached += 1
    return "\n".join([*found, *lines[reached:]])


@pytest.mark.parametrize(
    ("code", "script"), [("AMP101", CLIP), ("AMP108", BACKWARD), ("AMP205", ACCUMULATED), ("AMP105", UPDATE)]
)
def test_a_fix_fixes_its_finding(code, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(script)
    (seen,) = [each for each in run_watched(path, tmp_path) if each.finding.rule.code == code]
    name = Path(seen.finding.place.file).name  # as seen from the folder it ran in
    assert seen.diff.startswith(f"--- {name}\n+++ {name}\n@@ ")
    assert seen.diff_is_safe == (code != "AMP205")  # as the linter says
    assert linted(script, code)
    assert not linted(applied(seen.diff, script), code)
    context = [row for row in seen.diff.splitlines()[3:] if row.startswith(" ")]
    assert len(context) <= 6


def test_the_broken_example_has_one(warm, tmp_path):
    script = ROOT / "examples" / "broken_gpt.py"
    warm.run("-m", "ampwise", "run", "-q", "-o", "run", script, "--steps", "3", cwd=tmp_path).check_returncode()
    by_code = {seen.finding.rule.code: seen for seen in Run.read(tmp_path / "run").findings}
    assert by_code.keys() == {"AMP101", "AMP114", "AMP204", "AMP501"}, "the four mistakes of `make demo`"
    text = script.read_text(encoding="utf-8")
    clip = by_code.pop("AMP101")
    assert applied(clip.diff, text).replace("        scaler.unscale_(optimizer)\n", "", 1) == text
    assert not linted(applied(clip.diff, text), "AMP101")
    assert not by_code["AMP501"].diff, "what the linter cannot fix has no diff"


def test_one_of_the_linters_goes_to_one_finding_and_first_to_its_line(tmp_path):
    loop = CLIP.split("for _ in")[1]
    path = tmp_path / "train.py"
    path.write_text(CLIP + "\nfor _ in" + loop.replace("1.0", "2.0"))
    lines = path.read_text().split("\n")
    first, second = [number for number, line in enumerate(lines, 1) if "clip_grad_norm_" in line]
    seen = [clip_at(path, line) for line in (second, first + 4, first)]  # the middle one is none of the linter's
    add_diffs(seen, str(tmp_path), time.time() + 60)
    assert [bool(each.diff) for each in seen] == [True, False, True]
    assert "2.0" in "".join(seen[0].diff.split("@@")[2:])
    fixed = applied(seen[2].diff, path.read_text())
    assert fixed.index("unscale_") < fixed.index("1.0,")


def test_a_line_off_is_still_in_the_loop_and_one_outside_is_not(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CLIP)
    clip = CLIP.split("\n").index("    nn.utils.clip_grad_norm_(") + 1
    near, outside = clip_at(path, clip - 1), clip_at(path, 3)
    add_diffs([near], str(tmp_path), time.time() + 60)
    add_diffs([outside], str(tmp_path), time.time() + 60)
    assert near.diff
    assert not outside.diff


def clip_at(path, line):
    return CountedFinding(finding=find_rule("AMP101").at(Place(file=str(path), line=line), "clipped too hard"))


@pytest.mark.parametrize("what", ["changed since", "gone", "not Python", "too large", "suppressed"])
def test_what_is_not_known_to_have_run_has_no_diff(tmp_path, what):
    path = tmp_path / "train.py"
    text = {"not Python": "for\n" * 30, "too large": CLIP + "# " + "x" * fixes.LARGEST_BYTES}.get(what, CLIP)
    path.write_text(text.replace("norm_(", "norm_(  # noqa: AMP101") if what == "suppressed" else text)
    since = path.stat().st_mtime + (-10 if what == "changed since" else 10)
    if what == "gone":
        path.unlink()
    seen = clip_at(path, CLIP.split("\n").index("    nn.utils.clip_grad_norm_(") + 1)
    add_diffs([seen], str(tmp_path), since)
    assert seen.diff == ""


def test_a_script_that_has_gone_to_another_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(CLIP)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    seen = clip_at("train.py", CLIP.split("\n").index("    nn.utils.clip_grad_norm_(") + 1)
    add_diffs([seen], str(tmp_path), time.time() + 60)
    assert seen.diff.startswith("--- train.py\n")


def test_a_clip_in_another_file_than_the_loop(warm, tmp_path):
    (tmp_path / "clipping.py").write_text(
        "from torch import nn\n\n\ndef clip(scaler, optimizer, model):\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    call = "    nn.utils.clip_grad_norm_(\n        model.parameters(),\n        1.0,\n    )\n"
    script = CLIP.replace(call, "    clip(scaler, optimizer, model)\n").replace(
        "from torch import nn\n", "from clipping import clip\nfrom torch import nn\n"
    )
    (tmp_path / "train.py").write_text(script)
    warm.run("-m", "ampwise", "run", "-q", "-o", "run", "train.py", cwd=tmp_path).check_returncode()
    (seen,) = [each for each in Run.read(tmp_path / "run").findings if each.finding.rule.code == "AMP101"]
    assert seen.finding.place.file.endswith("clipping.py")
    assert seen.diff == "", "the linter fixes no call whose scaler is another file's"


def test_there_is_an_end_to_the_time(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(CLIP)
    monkeypatch.setattr(fixes, "SECONDS", -1.0)
    seen = clip_at(path, CLIP.split("\n").index("    nn.utils.clip_grad_norm_(") + 1)
    add_diffs([seen], str(tmp_path), time.time() + 60)
    assert seen.diff == ""


def test_a_failure_in_here_costs_the_diff_and_not_the_record(tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("broken")

    monkeypatch.setattr("ampwise.check.linter.check_texts", fail)
    path = tmp_path / "train.py"
    path.write_text(CLIP)
    with Watch(RecordWriter.create(tmp_path / "run"), timing=False) as watch:
        runpy.run_path(str(path))
    assert watch.failures
    run = Run.read(tmp_path / "run")
    assert run.status == "finished"
    assert [(seen.finding.rule.code, seen.diff) for seen in run.findings] == [("AMP101", "")]


def test_an_excerpt_has_enough_around_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CLIP)
    (seen,) = run_watched(path, tmp_path)
    first, line = seen.excerpt["first_line"], seen.finding.place.line
    assert first == line - 6
    assert seen.excerpt["lines"] == CLIP.split("\n")[first - 1 : line + 6][: len(seen.excerpt["lines"])]
