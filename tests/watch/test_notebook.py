"""``%%ampwise`` in a real IPython."""

import atexit
import re
import sys
from tempfile import gettempdir
from traceback import walk_tb

import pytest

from ampwise.runs.reader import Run

pytest.importorskip("IPython")

SETUP = """
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
"""
TRAIN = """
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def without_colour(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    atexit.unregister(shell.atexit_operations)
    shell.run_line_magic("load_ext", "ampwise")
    return shell


@pytest.mark.filterwarnings("ignore")
def test_a_cell_is_watched_with_what_earlier_cells_have_made(shell, capsys, tmp_path):
    import torch

    shell.run_cell(SETUP)
    original = shell.user_ns["clip_grad_norm_"]
    folder = tmp_path / "run"
    assert shell.run_cell(f"%%ampwise -o {folder} --every 1\n{TRAIN}print('trained')").success
    out = capsys.readouterr().out
    assert out.startswith("trained\n")
    assert "AMP101" in out
    assert "5 times, steps 1 to 5" in out
    assert shell.user_ns["clip_grad_norm_"] is original is torch.nn.utils.clip_grad_norm_
    run = Run.read(folder)
    assert sum(bucket.count for bucket in run.steps) == 5
    assert any("clip_grad_norm_" in line for line in run.findings[0].excerpt["lines"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("last", "shown"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ExceptionGroup('all of them', [ValueError('one')])", "ExceptionGroup: all of them"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("exec('a b')", "SyntaxError: invalid syntax"),
    ],
)
def test_an_error_in_a_cell_is_shown_once_and_stops_what_comes_after(shell, capsys, last, shown):
    shell.run_cell(SETUP)
    result = shell.run_cell(f"%%ampwise\n{TRAIN}{last}")
    told = without_colour("".join(capsys.readouterr()))
    assert told.count(f"The script failed with {shown}") == 1
    assert told.count(shown) == 2  # once by IPython, and in that sentence
    assert "CellFailed" not in told
    assert "AMP101" in told
    assert not result.success  # which "Run All" asks
    assert f"{type(result.error_in_exec.__cause__).__name__}: {result.error_in_exec.__cause__}".startswith(
        str(result.error_in_exec)
    )


@pytest.mark.filterwarnings("ignore")
def test_the_debugger_finds_the_line_that_failed(shell, capsys):
    shell.run_cell(SETUP)
    shell.run_cell("%%ampwise\ndef fails():\n    culprit = 3\n    1 / 0\nfails()")
    capsys.readouterr()
    *_, (frame, _) = walk_tb(sys.last_traceback)
    assert frame.f_locals["culprit"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_cell_that_is_no_python_has_failed_too(shell, capsys, tmp_path):
    result = shell.run_cell(f"%%ampwise -o {tmp_path / 'run'}\nfor in:")
    assert not result.success
    told = without_colour(capsys.readouterr().out)
    assert (told.count("SyntaxError: "), told.count("failed with SyntaxError: ")) == (2, 1)
    assert Run.read(tmp_path / "run").status == "failed"


@pytest.mark.filterwarnings("ignore")
def test_a_record_that_is_gone_is_not_named(shell, capsys, tmp_path):
    shell.run_cell(SETUP)
    for cell in (TRAIN, "pass"):
        shell.run_cell(f"%%ampwise\n{cell}")
        out = capsys.readouterr().out
        assert "`%%ampwise -o RUN` keeps the record, for `ampwise report RUN`.\n" in out
        assert "The record is in" not in out
        assert f"ampwise report {gettempdir()}" not in out
        shell.run_cell(f"%%ampwise -f -o {tmp_path / 'run'}\n{cell}")
        out = capsys.readouterr().out
        assert f"The record is in {tmp_path / 'run'}" in out
        assert "keeps the record" not in out


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_option_is_reported(shell, capsys):
    shell.run_cell("%%ampwise --evry 3\nprint('ran')")
    out = capsys.readouterr().out
    assert "%%ampwise [-o RUN]" in out
    assert "ran\n" not in out


class Shown:
    """What a front end is handed."""

    def __init__(self, shell, monkeypatch):
        self.bundles = []
        monkeypatch.setattr(shell.display_pub, "publish", self.publish)

    def publish(self, data, metadata=None, **_):
        self.bundles.append(data)


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_gets_html_and_the_text_for_who_cannot_show_it(shell, capsys, monkeypatch):
    shown = Shown(shell, monkeypatch)
    shell.run_cell(SETUP)
    shell.run_cell(f"%%ampwise\n{TRAIN}")
    [bundle] = shown.bundles
    assert bundle["text/html"].startswith("<div")
    for told in ("AMP101", "clip_grad_norm_", "5 times, steps 1 to 5"):
        assert told in bundle["text/html"]
        assert told in bundle["text/plain"]
    assert "<script" not in bundle["text/html"]
    assert "AMP101" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_terminal_gets_the_text_alone(shell, capsys, monkeypatch):
    shown = Shown(shell, monkeypatch)
    shell.display_formatter.active_types = ["text/plain"]  # as IPython does in a terminal
    shell.run_cell(SETUP)
    shell.run_cell(f"%%ampwise\n{TRAIN}")
    out = capsys.readouterr().out
    assert "AMP101" in out
    assert "<div" not in out
    assert not shown.bundles
