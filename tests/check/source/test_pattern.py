"""A pattern does what ``re`` does, but later."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.lazy_pattern import LazyPattern

TEXTS = ["ab", "a(b)?", "^a|b$", "[ab]+"]


@given(st.sampled_from(TEXTS), st.text("abAB\n", max_size=6), st.sampled_from([0, re.IGNORECASE, re.MULTILINE]))
def test_as_re(pattern, text, flags):
    ours, oracle = LazyPattern(pattern, flags), re.compile(pattern, flags)
    for name in ("search", "match", "fullmatch"):
        found, expected = getattr(ours, name)(text), getattr(oracle, name)(text)
        assert (found and found.span()) == (expected and expected.span())
    assert ours.findall(text) == oracle.findall(text)
    assert [found.span() for found in ours.finditer(text)] == [found.span() for found in oracle.finditer(text)]


def test_compiled_at_first_use_and_once():
    pattern = LazyPattern("(")
    with pytest.raises(re.error, match="unterminated subpattern"):
        pattern.search("a")
    sound = LazyPattern("a")
    assert sound.search("a")
    assert sound.compiled is sound.compiled
    assert sound.search is sound.search
