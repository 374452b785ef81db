"""`ampwise check` takes time in proportion to its input, or stops at a limit and says so.

Cost is the number of calls that Python makes, which is the same on every machine. At twice the size it may be twice as
high, and a little more; what is quadratic comes to four times.
"""

import cProfile

import pytest

from ampwise.check.linter import CheckTask, check_texts
from ampwise.finding.registry import source_rules

from .effort import FULL
from .hostile import SOURCES

MOST_PER_DOUBLING = 2.6
# In `make test` one of each kind: what took longest before, and what the limits are for.
IN_SHORT = (
    "some_paths_many_backwards",
    "chain_of_helpers",
    "many_scalers",
    "deprecated_alias",
    "cells_of_a_notebook",
)
# These meet a limit on what is followed only from some size on, and grow faster until then.
START = {
    "deprecated_alias": 120,
    "deprecated_imports": 120,
    "tests_of_type": 120,
    "nested_ifs": 200,
    "elif_chain": 200,
    "early_ends": 200,
    "one_name_in_half": 300,
    "layers_of_helpers": 100,
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Rules that are loaded and patterns that are compiled."""
    for name in SOURCES if FULL else IN_SHORT:
        if name not in START:
            cost(SOURCES[name](3))


def cost(files):
    codes = frozenset(rule.RULE.code for rule in source_rules())
    task = CheckTask(tuple(files), dict.fromkeys(files, codes), files)
    profile = cProfile.Profile()
    report = profile.runcall(check_texts, task)
    assert report.files_checked + len(report.unreadable) == len(files)
    assert not [note for note in report.notes if "internal error" in note]
    return sum(entry.callcount for entry in profile.getstats())


# The fix of AMP402 reads all names of the file for each finding.
SLOW = {"losses_of_bce": pytest.mark.xfail(reason="quadratic in the number of BCELoss objects")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in (SOURCES if FULL else IN_SHORT)]
)
def test_twice_the_source_costs_about_twice_as_much(name):
    size = START.get(name, 60 if FULL else 40)
    once, twice = (cost(SOURCES[name](times * size)) for times in (1, 2))
    assert twice / once < MOST_PER_DOUBLING, f"{name}: {once:,} calls at {size}, {twice:,} at {2 * size}"
