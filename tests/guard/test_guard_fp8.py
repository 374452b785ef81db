"""FP8 that does not hold a model: the layers it is about in BF16 first, and then all of them."""

from types import SimpleNamespace

import pytest
import torch

from ampwise import Policy
from ampwise.finding import Finding, Place
from ampwise.guard import recovery
from ampwise.guard.recovery import Recovery
from ampwise.hardware import Cpu
from ampwise.rules.amp54x_fp8.fp8_saturates import RULE
from ampwise.train.precision.precision import cpu_precisions

LAYERS = ["blocks.0.up", "blocks.0.down"]


def engine(policy, layers=LAYERS, flagged=()):
    return SimpleNamespace(
        policy=policy,
        precision=policy.base,
        precision_locked_because="",
        fp8_layers=list(layers),
        device=torch.device("cpu"),
        findings=[RULE.at(Place(module=name, step=3), "cut off") for name in flagged],
    )


@pytest.fixture(autouse=True)
def on_some_cpu(monkeypatch):
    facts = cpu_precisions(Cpu(model="some CPU", features=frozenset()))
    monkeypatch.setattr(recovery, "precisions_of", lambda device: facts)


def wider(policy, narrow=(), patterns=(), layers=LAYERS):
    found = object.__new__(Recovery)
    found._engine = engine(policy, layers)
    return found._wider(patterns, narrow)


def test_layers_that_are_flagged_go_to_bf16_first():
    policy = wider(Policy("fp8"), ["blocks.0.up"])
    assert policy == Policy("fp8").keep("bf16", "blocks.0.up")
    assert wider(policy, ["blocks.0.up"], layers=LAYERS[1:]) == Policy("bf16", policy.rules)


def test_where_all_are_flagged_or_none_the_model_goes_to_bf16():
    assert wider(Policy("fp8"), LAYERS) == Policy("bf16")
    assert wider(Policy("fp8")) == Policy("bf16")


def test_modules_that_overflow_are_kept_in_fp32_as_in_other_precisions():
    assert wider(Policy("fp8"), patterns=["head"]) == Policy("fp8").keep("fp32", "head")


def test_layers_are_flagged_by_findings_about_them():
    assert recovery._too_narrow(engine(Policy("fp8"), flagged=["blocks.0.up", "head", "blocks.0.up"])) == (
        "blocks.0.up",
    )
    assert recovery._too_narrow(engine(Policy("bf16"), (), ["blocks.0.up"])) == ()
    assert isinstance(engine(Policy("fp8"), flagged=["a"]).findings[0], Finding)
