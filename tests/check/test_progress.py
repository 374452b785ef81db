"""A bar on a terminal, and nothing anywhere else."""

import io

import pytest

from ampwise.check import progress
from ampwise.check.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(total, stream, monkeypatch):
    monkeypatch.setattr(progress, "BETWEEN_S", 0)
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressBar(total, stream) as bar:
        for _ in range(total):
            bar.advance()
    return stream.getvalue()


def test_a_bar_that_grows_and_is_erased(monkeypatch):
    text = shown(400, Terminal(), monkeypatch)
    assert "[####################--------------------] 200/400 files" in text
    assert text.endswith("400/400 files\r\x1b[K")
    assert "\n" not in text


@pytest.mark.parametrize(("total", "stream"), [(200, Terminal()), (400, io.StringIO())], ids=["few", "a pipe"])
def test_no_bar(monkeypatch, total, stream):
    assert shown(total, stream, monkeypatch) == ""


def test_it_is_erased_also_when_the_run_stops():
    stream = Terminal()

    def stopped():
        with ProgressBar(400, stream) as bar:
            bar.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_terminal_too_narrow_for_a_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "5")
    with ProgressBar(400, stream) as bar:
        bar.advance()
    assert "[] 1/400 files" in stream.getvalue()
