"""Progress: a bar on a terminal, lines elsewhere, nothing where it is to be quiet."""

import io

from ampwise.tune.search.progress import ProgressCounter, SearchProgress, progress_on
from ampwise.tune.search.search import search

from .models import deep


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(doing="3 in e4m3: error 0.1, does not pass", left=95.0):
    return SearchProgress(doing=doing, done=5, expected=20, seconds_left=left)


def test_lines_say_what_came_out_and_how_long_it_may_take():
    stream = io.StringIO()
    with progress_on(stream) as progress:
        progress(told())
        progress(told("FP32\x1b[2J", None))
    assert stream.getvalue() == (
        "ampwise: 3 in e4m3: error 0.1, does not pass; about 95 s left\nampwise: FP32\\x1b[2J\n"
    )


def test_a_terminal_has_a_bar_with_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with progress_on(stream) as progress:
        progress(told(left=600.0))
    assert "about 10 min left" in stream.getvalue()
    assert "3 in e4m3" in stream.getvalue()


def test_quiet_is_quiet():
    stream = io.StringIO()
    with progress_on(stream, quiet=True) as progress:
        assert progress is None
    assert stream.getvalue() == ""


def test_the_time_left_is_by_what_the_passes_took():
    seen, done = [], [0]
    pace = ProgressCounter(seen.append, lambda: done[0])
    pace.expected = 10
    pace.tell("first")
    done[0] = 5
    pace.tell("then")
    done[0] = 30
    pace.tell("longer than thought")
    assert [one.seconds_left is None for one in seen] == [True, False, True]
    assert [(one.done, one.expected) for one in seen] == [(0, 10), (5, 10), (30, 31)]


def test_a_search_says_each_trial():
    seen = []
    _, function, batches = deep(4, batches=2)
    found = search(function, batches, tolerance=0.9, progress=seen.append)
    assert [one.doing.partition(":")[0] for one in seen] == [
        "FP32 reference",
        "FP32 again, to measure noise",
        "probing each module",
        "4 in e4m3",
        "held back",
    ]
    assert found.trials == 2
    assert seen[-1].done <= found.passes
