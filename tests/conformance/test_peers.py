"""Ours is right in every case, and what docs/peers.md says of others is what they do."""

import json

import pytest
import torch

from .registry import HERE, Case, Outcome, all_cases, installed, versions

CASES = all_cases()
RECORD = json.loads((HERE / "seen.json").read_text(encoding="utf-8"))
RUNS = [(name, contender) for name, case in CASES.items() for contender in case.runs if contender != "ampwise"]


@pytest.mark.parametrize("name", CASES)
def test_ours_is_right(name):
    if name.startswith("fsdp2") and not hasattr(torch.cpu.current_stream(), "record_event"):
        pytest.skip("this version of torch cannot run FSDP2 on a CPU")
    outcome = CASES[name].outcome("ampwise")
    assert outcome.right, outcome.seen
    if versions("ampwise") == RECORD["contenders"]["ampwise"]["versions"]:
        assert outcome.seen == RECORD["cases"][name]["outcomes"]["ampwise"]["seen"]


@pytest.mark.half_by_day
@pytest.mark.parametrize(("name", "contender"), RUNS, ids=[f"{name}: {contender}" for name, contender in RUNS])
def test_what_is_recorded_is_what_happens(name, contender):
    if not installed(contender):
        pytest.skip(f"no {contender} here")
    recorded = RECORD["contenders"][contender]["versions"]
    if versions(contender) != recorded:
        pytest.skip(f"recorded with {recorded}, here is {versions(contender)}")
    outcome = CASES[name].outcome(contender)
    assert {"right": outcome.right, "seen": outcome.seen} == RECORD["cases"][name]["outcomes"][contender]


def test_the_record_has_every_case_and_no_other():
    assert list(RECORD["cases"]) == list(CASES), "run `make peers`"
    for name, case in CASES.items():
        recorded = RECORD["cases"][name]
        assert (recorded["title"], recorded["why"]) == (case.title, case.why), "run `make peers`"
        assert set(recorded["outcomes"]) == set(case.runs), "run `make peers`"
        assert recorded["outcomes"]["ampwise"]["right"]


def test_an_exception_is_a_wrong_outcome():
    case = Case("a", title="", why="")
    case.by("torch")(lambda contender: [][0])
    assert case.outcome("torch") == Outcome(False, "raises IndexError: list index out of range")
