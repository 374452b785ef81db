"""How far it is: a bar on a terminal, lines elsewhere, nothing for who wants nothing."""

import io

from ampwise.tune.bench.bench import progress_on


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_that_is_gone_at_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress_on(stream) as tell:
        tell(1, 10, "measuring: [bold]evil[/bold]\x1b[2J")
        tell(10, 10, "profiling: fp32")
    shown = stream.getvalue()
    assert "profiling: fp32" in shown
    assert "\x1b[2J" not in shown, "a label's own escapes are not the terminal's"
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_line_for_each_thing_done_elsewhere():
    stream = io.StringIO()
    with progress_on(stream) as tell:
        for label in ("fp32", "bf16"):
            tell(1, 8, f"comparing losses: {label}")
        tell(5, 20, "measuring: fp32")
    assert stream.getvalue() == "ampwise: comparing losses (1/8)\nampwise: measuring (5/20)\n"


def test_quiet():
    stream = Terminal()
    with progress_on(stream, quiet=True) as tell:
        assert tell is None
    assert stream.getvalue() == ""
