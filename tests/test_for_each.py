"""A test with many cases goes through all of them and names those that fail."""

import pytest

from .for_each import for_each

SEEN = []


@for_each("word", ["a", "b"])
@for_each(("number", "double"), [(1, 2), (2, 4), (3, 6)])
def test_every_combination_is_gone_through(word, number, double, tmp_path):
    assert double == 2 * number
    assert tmp_path.is_dir()
    SEEN.append((word, number))


def test_after_that():
    assert not SEEN or [(word, number) for word in "ab" for number in (1, 2, 3)] == SEEN


def test_all_that_fail_are_named_with_the_first_error():
    tried = []

    @for_each("divisor", [1, 0, "x"])
    def divides(divisor):
        tried.append(divisor)
        assert 1 / divisor == 1

    with pytest.raises(ZeroDivisionError) as caught:
        divides()
    assert tried == [1, 0, "x"]
    assert caught.value.__notes__ == ["with 2 of 3 cases: divisor=0; divisor='x'"]


def test_without_cases_there_is_no_test():
    with pytest.raises(AssertionError, match="without a case nothing is tested"):
        for_each("one", [])


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        for_each(("one", "other"), [(1, 2, 3)])
