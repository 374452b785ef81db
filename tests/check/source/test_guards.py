"""What an ``if`` tells about its branches: two spellings of one question give one guard."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.guards import guards_of

from .reading import code_of, function_of

PARAMETERS = "a, b, c, i, n, scaler, clip, args, self, loader"


def guards(test, before="pass"):
    code = code_of(f"def f({PARAMETERS}):\n    {before}\n    if {test}:\n        pass\n")
    function = function_of(code, "f")
    return guards_of(function.body[-1].test, code.frame(function))


def known(test, before="pass"):
    """What holds in the branch, and what holds in the other; the file's part of a key left out."""
    holds, fails = guards(test, before)
    return {(plain(g.text), g.holds) for g in holds}, {(plain(g.text), g.holds) for g in fails}


def plain(text):
    """``some(script.py:7f..:scaler)`` as ``some(scaler)``."""
    return re.sub(r"\??script\.py:(?:[0-9a-f]+:)?", "", text)


@pytest.mark.parametrize(
    "test",
    ["scaler", "scaler is not None", "scaler != None", "not scaler is None", "not not scaler"],
)
def test_asking_for_something_is_one_question(test):
    before = f"ready = {test}"
    assert known("ready", before) == ({("some(scaler)", True)}, {("some(scaler)", False)})


@pytest.mark.parametrize("test", ["scaler is None", "not scaler", "scaler == None"])
def test_asking_for_nothing_is_the_other_answer(test):
    assert known(test) == ({("some(scaler)", False)}, {("some(scaler)", True)})


@pytest.mark.parametrize("test", ["clip > 0", "clip != 0", "clip is not None", "clip"])
def test_a_clip_above_zero_is_a_clip(test):
    assert known(test) == ({("some(clip)", True)}, {("some(clip)", False)})


def test_equal_and_not_equal_are_one_question():
    assert known("a == 'norm'")[0] == known("a != 'norm'")[1]
    assert known("a in b")[0] == known("a not in b")[1]
    assert known("a is b")[0] == known("a is not b")[1]
    assert known("a == 'norm'")[0] != known("a == 'value'")[0]


def test_and_says_both_where_it_holds_and_only_itself_where_it_fails():
    whole = "some(a and b)"
    assert known("a and b") == ({("some(a)", True), ("some(b)", True), (whole, True)}, {(whole, False)})


def test_or_says_both_where_it_fails_and_only_itself_where_it_holds():
    whole = "some(a or b)"
    assert known("a or b") == ({(whole, True)}, {("some(a)", False), ("some(b)", False), (whole, False)})


@pytest.mark.parametrize(
    "test",
    [
        "(i + 1) % n == 0",
        "not (i + 1) % n",
        "i % n == n - 1",
        "0 == i % n",
        "(i + 1) % n == 0 or i + 1 == len(loader)",
        "i + 1 == len(loader) or (i + 1) % n == 0",
    ],
)
def test_the_end_of_a_window(test):
    (at,), (off,) = guards(test)
    assert (at.boundary, at.holds) == ("n", True)
    assert (off.boundary, off.holds) == ("n", False)
    assert at.text == off.text


@pytest.mark.parametrize("test", ["(i + 1) % n != 0", "i % n", "(i + 1) % n > 0"])
def test_amid_a_window(test):
    (off,), (at,) = guards(test)
    assert (off.boundary, off.holds) == ("n", False)
    assert (at.boundary, at.holds) == ("n", True)


def test_the_end_of_a_window_and_more():
    holds, fails = guards("(i + 1) % n == 0 and i > 100")
    assert any(guard.boundary == "n" and guard.holds for guard in holds)
    assert fails == ()


def test_two_windows_are_two_questions():
    assert known("i % n == 0")[0] != known("i % b == 0")[0]


@pytest.mark.parametrize(
    ("before", "test"),
    [
        ("last = (i + 1) % n == 0", "last"),
        ("last = (i + 1) % n == 0; step = last", "step"),
        ("last = not (i + 1) % n", "last"),
        ("last = bool((i + 1) % n == 0)", "last"),
        ("self.last = (i + 1) % n == 0", "self.last"),
    ],
)
def test_a_test_with_a_name_is_the_test(before, test):
    assert guards(test, before)[0][0].boundary == "n"


def test_a_name_assigned_twice_is_a_question_of_its_own():
    holds, _ = guards("flag", "flag = a is None; flag = b is None")
    assert [plain(guard.text) for guard in holds] == ["some(flag)"]


def test_the_same_question_in_two_functions_is_one_where_the_object_is_one():
    code = code_of(
        """
        def main(scaler, opt):
            if scaler is not None:
                scaler.scale(1).backward()
            finish(scaler, opt)

        def finish(grad_scaler, opt):
            if grad_scaler:
                grad_scaler.step(opt)
        """
    )
    backward, step = (event.context.guards for event in code.events)
    assert backward == step


def compound(atoms):
    return st.recursive(
        st.sampled_from(atoms),
        lambda inner: st.one_of(
            inner.map(lambda test: f"not ({test})"),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}) and ({pair[1]})"),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}) or ({pair[1]})"),
        ),
        max_leaves=4,
    )


@given(compound(["a", "b is None", "c == 'x'", "clip > 0", "i % n == 0"]))
def test_not_swaps_what_is_known(test):
    code = code_of(f"def f({PARAMETERS}):\n    if {test}:\n        pass\n    if not ({test}):\n        pass\n")
    function = function_of(code, "f")
    first, second = (guards_of(node.test, code.frame(function)) for node in function.body)
    assert first == (second[1], second[0])


@given(
    compound(["a", "a is None", "b", "b == 'x'", "b != 'x'", "c > 0", "c"]),
    st.fixed_dictionaries(
        {"a": st.sampled_from([None, "x"]), "b": st.sampled_from([None, "x", "y"]), "c": st.sampled_from([0, 2])}
    ),
)
def test_what_is_known_in_the_branch_taken_is_true(test, values):
    holds, fails = known(test)
    truth = {f"some({name})": bool(value) for name, value in values.items()} | {"b Eq 'x'": values["b"] == "x"}
    for text, answer in holds if eval(test, dict(values)) else fails:
        if text not in truth:  # an `and` or an `or` as a whole: some(a or b)
            truth[text] = bool(eval(text.removeprefix("some"), dict(values)))
        assert truth[text] is answer
