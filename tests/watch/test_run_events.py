"""Calls that take CUDA, several threads or several processes to make: the record alone decides, so it is made here."""

import pytest

from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import run_checks
from ampwise.watch.run_events import ScalerStep, ScriptFailed, Unscale

HERE = CallSite(file="train.py", line=12)
BEFORE = CallSite(file="train.py", line=9)
UNSAFE = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."

CASES = [
    (
        "AMP103",
        Unscale(site=HERE, again=True, earlier=HERE, new_pass=True),
        Unscale(site=HERE),
    ),
    ("AMP203", ScalerStep(site=HERE, optimizer="SGD", threads=2), ScalerStep(site=HERE, optimizer="SGD", threads=1)),
    ("AMP309", ScalerStep(site=HERE, optimizer="SGD", fsdp=True), ScalerStep(site=HERE, optimizer="SGD")),
    (
        "AMP402",
        ScriptFailed(site=HERE, error="RuntimeError", message=UNSAFE),
        ScriptFailed(site=HERE, error="RuntimeError", message="CUDA out of memory"),
    ),
]


@pytest.mark.parametrize(("code", "faulty", "fine"), CASES, ids=[code for code, *_ in CASES])
def test_the_record_is_judged(code, faulty, fine):
    (finding,) = run_checks(faulty)
    assert (finding.rule.code, finding.place.line) == (code, 12)
    assert run_checks(fine) == []


def test_a_second_unscale_is_not_to_be_removed_where_it_belongs_to_the_next_iteration():
    (again,) = run_checks(Unscale(site=HERE, again=True, earlier=BEFORE))
    (later,) = run_checks(Unscale(site=HERE, again=True, earlier=BEFORE, new_pass=True))
    assert "remove the second" in again.fix
    assert "no `update`, since the `unscale_` at train.py:9" in later.message
    assert "remove" not in later.fix
