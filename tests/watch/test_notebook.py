"""``%%ampwise`` in a real IPython."""

import atexit

import pytest

from ampwise.record.reader import Run

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
    assert "×5" in out
    assert "0.weight" in out
    assert shell.user_ns["clip_grad_norm_"] is original is torch.nn.utils.clip_grad_norm_
    run = Run.read(folder)
    assert sum(bucket.count for bucket in run.steps) == 5
    assert any("clip_grad_norm_" in line for line in run.findings[0].excerpt["lines"])


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_a_cell_is_shown_once_and_told(shell, capsys):
    shell.run_cell(SETUP)
    shell.run_cell(f"%%ampwise\n{TRAIN}1 / 0")
    out = capsys.readouterr().out
    assert out.count("ZeroDivisionError: division by zero") == 1
    assert "AMP101" in out


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_option_is_told(shell, capsys):
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
    for told in ("AMP101", "clip_grad_norm_", "×5"):
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
