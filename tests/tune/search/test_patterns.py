"""Patterns match what they are for, and nothing else."""

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.search.patterns import globs, spans

PART = st.sampled_from(["blocks", "0", "1", "12", "up", "a[0]", "x*", "q?"])
NAMES = st.sets(st.lists(PART, min_size=1, max_size=4).map(".".join), max_size=12)


@given(NAMES, NAMES)
def test_they_match_all_of_the_names_and_none_of_the_others(names, others):
    others = others - names
    patterns = globs(sorted(names), others)
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in patterns)
    for name in others:
        assert not any(fnmatchcase(name, pattern) for pattern in patterns)


def test_numbers_give_way_where_they_can():
    names = [f"blocks.{block}.{part}" for block in range(12) for part in ("up", "down")]
    assert globs(names, ["head", "blocks.0"]) == ["blocks.*.up", "blocks.*.down"]
    assert globs(["experts.0.0", "experts.1.0"], ["experts.0.2", "experts.1.2"]) == ["experts.*.0"]


def test_none_is_there_that_another_makes_needless():
    assert globs(["blocks.0.up", "blocks.0", "blocks.1.up", "blocks.1", "head"], ["stem"]) == ["blocks.*", "head"]


def test_the_model_itself_has_an_empty_name():
    assert globs([""], ["body", "head"]) == [""]


def test_for_people_numbers_are_spans():
    assert spans(["layers.0", "layers.1", "layers.2", "layers.4"]) == ["layers.{0..2,4}"]
    assert spans(["a.0.x", "a.1.x", "a.0.y", "", "b"]) == ["a.{0,1}.x", "a.0.y", "", "b"]
