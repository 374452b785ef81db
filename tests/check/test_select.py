"""Which rules selectors choose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.selectors import SelectorLayer, chosen_codes, matching_codes
from ampwise.errors import BadInput, UnknownName
from ampwise.finding import Rule, Severity, registry


def make(code, name, on_by_default=True):
    return Rule(
        code=code,
        name=name,
        severity=Severity.INFO,
        summary="s",
        why="w",
        fix="f",
        bad="b",
        good="g",
        on_by_default=on_by_default,
    )


@pytest.fixture
def registered(monkeypatch):
    """All the rules there are, of which only one is about something else than source."""
    monkeypatch.setattr(registry, "all_rules", lambda: [make("AMP701", "hot")])


RULES = [
    make("AMP101", "one-a"),
    make("AMP102", "one-b"),
    make("AMP111", "one-c", on_by_default=False),
    make("AMP201", "two-a"),
    make("ACM101", "acme"),
]
CODES = {rule.code for rule in RULES}


def chosen(*layers):
    return set(chosen_codes(RULES, [SelectorLayer(**layer) for layer in layers]))


@pytest.mark.parametrize(
    ("layers", "codes"),
    [
        ([{}], "AMP101 AMP102 AMP201 ACM101"),
        ([{"select": ("ALL",)}], "AMP101 AMP102 AMP111 AMP201 ACM101"),
        ([{"select": ("all",)}], "AMP101 AMP102 AMP111 AMP201 ACM101"),
        ([{"select": ("AMP1",)}], "AMP101 AMP102 AMP111"),
        ([{"select": ("amp10",)}], "AMP101 AMP102"),
        ([{"select": ("one-c", "TWO-A")}], "AMP111 AMP201"),
        ([{"select": ()}], ""),
        ([{"select": ("AMP1",), "ignore": ("AMP101",)}], "AMP102 AMP111"),
        ([{"select": ("AMP101",), "ignore": ("AMP1",)}], "AMP101"),
        ([{"select": ("one-a",), "ignore": ("AMP1",)}], "AMP101"),
        ([{"select": ("one-a",), "ignore": ("AMP101",)}], ""),
        ([{"select": ("AMP101",), "ignore": ("one-a",)}], ""),
        ([{"select": ("AMP1",), "ignore": ("AMP1",)}], ""),
        ([{"ignore": ("ALL",), "extend_select": ("AMP1",)}], "AMP101 AMP102 AMP111"),
        ([{"extend_select": ("AMP111",)}], "AMP101 AMP102 AMP111 AMP201 ACM101"),
        ([{"ignore": ("AMP1",)}], "AMP201 ACM101"),
        # The command line after the settings.
        ([{"ignore": ("AMP101",)}, {"select": ("AMP1",)}], "AMP101 AMP102 AMP111"),
        ([{"select": ("AMP1",)}, {"ignore": ("AMP101",)}], "AMP102 AMP111"),
        ([{"select": ("AMP2",)}, {"extend_select": ("AMP111",)}], "AMP111 AMP201"),
    ],
)
def test_as_ruff_understands_them(layers, codes):
    assert chosen(*layers) == set(codes.split())


SELECTORS = st.lists(st.sampled_from(["ALL", "AMP", "AMP1", "AMP10", "AMP101", "one-a", "AMP2", "acme"])).map(tuple)


@given(SELECTORS, SELECTORS, st.randoms())
def test_the_order_of_selectors_does_not_matter(select, ignore, random):
    shuffled = tuple(random.sample(select, len(select)))
    assert chosen({"select": select, "ignore": ignore}) == chosen({"select": shuffled, "ignore": ignore})


@given(SELECTORS)
def test_selecting_and_ignoring_the_same_chooses_nothing(selectors):
    assert chosen({"select": selectors, "ignore": selectors}) == set()


@given(SELECTORS, SELECTORS)
def test_ignoring_more_never_chooses_more(select, ignore):
    assert chosen({"select": select, "ignore": ignore}) <= chosen({"select": select})


@pytest.mark.parametrize("selector", ["AMP9", "one", "", "AMP1011", "AMP-1", "one-"])
def test_a_selector_that_means_nothing(registered, selector):
    with pytest.raises(UnknownName) as caught:
        matching_codes(selector, RULES, " in x.toml")
    assert f"unknown rule selector in x.toml {selector!r}. " in str(caught.value)
    assert "`ampwise explain` lists the rules" in str(caught.value)


def test_the_nearest_is_named(registered):
    with pytest.raises(UnknownName, match="Did you mean one-a"):
        matching_codes("one-aa", RULES)


def test_a_rule_about_something_else(registered):
    with pytest.raises(BadInput, match="AMP701: `ampwise check` cannot look for this") as caught:
        matching_codes("AMP701", RULES)
    assert "`ampwise explain AMP701` says what it is" in str(caught.value)
