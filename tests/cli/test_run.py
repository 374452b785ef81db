"""``ampwise run`` before the script begins; what it does then is in tests/watch."""

import sys

import pytest

from ampwise.cli import main


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('was_run', 'w')\n")
    return "train.py"


def test_without_torch_it_says_where_to_install_it_and_runs_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not there
    assert main(["run", script]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said == (
        f"ampwise: error: ampwise run needs torch, which is not installed in this Python: {sys.executable}. "
        "Scripts run in the Python that ampwise is installed in: install it in the script's environment, pip install "
        "'ampwise[torch]'. (pipx and uvx use an environment of their own.)\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [script]


def test_what_is_not_python_is_refused_before_there_is_a_record(script, tmp_path, capsys):
    (tmp_path / "x.bin").write_bytes(bytes(range(128, 256)))
    assert main(["run", "-o", "run", "x.bin"]) == 2
    assert "x.bin is not Python source: it is not UTF-8 text. Give the path of a script.\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_script_that_is_not_there_is_reported_first(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["run", "gone.py"]) == 2
    assert "gone.py" in capsys.readouterr().err
