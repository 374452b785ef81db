"""The words of a test, without the path of its file."""

import pytest

from ampwise.check.source.questions import guard_source

from .reading import code_of


@pytest.mark.parametrize(
    ("test", "asked"),
    [("flag", "flag"), ("not flag", "flag"), ("flag is None", "flag is None"), ("ready", "flag > 1")],
)
def test_a_guard_is_put_in_words(test, asked):
    text = f"def main(scaler, opt, flag):\n    ready = flag > 1\n    if {test}:\n        scaler.step(opt)\n"
    (event,) = code_of(text).events
    (guard,) = event.context.guards
    assert guard_source(guard) == asked
    assert "script.py" in guard.text
