"""Evidence of two sides, made up."""

import math

import pytest

from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import run_checks
from ampwise.tune.diff.step_difference import ErrorLocation, ModuleRow, OpRow, ParameterRow, SideFacts, StepDifference
from ampwise.tune.diff.tensor_difference import ComparedTensor, TensorDifference


def measured(error=0.01, *, norm=1.0, cosine=None, shape=(10, 10), **counts):
    """Of a relative error; with a cosine, b is as long as that makes it."""
    norm_b = norm if cosine is None else norm * (cosine + math.sqrt(max(0.0, cosine**2 - 1 + error**2)))
    defaults = {"largest_error": error, "largest_at": (0, 0), "largest_a": norm, "largest_b": norm}
    zeros = {"zeros_a": 0, "zeros_b": 0, "bad_a": 0, "bad_b": 0}
    return TensorDifference(
        shape=shape, norm_a=norm, norm_b=norm_b, norm_error=error * norm, **defaults | zeros | counts
    )


def compared(error=0.01, *, given=0.0, own=0.01, floor=None, why_not="", **rest):
    found = None if why_not else measured(error, **rest)
    return ComparedTensor(measured=found, given=given, own=own, floor=floor, why_not=why_not)


def spot(error=0.5, module="block", *, phase="forward", op=None, shrinks=None, flushed=False, before="", **rest):
    made = None
    if op is not None:
        site = CallSite(file="model.py", line=12)
        made = OpRow(op=op, module=module, call=0, phase=phase, compared=compared(error, **rest), site=site)
    return ErrorLocation(
        module=module,
        kind="Block",
        phase=phase,
        compared=compared(error, **rest),
        op=made,
        shrinks=shrinks,
        flushed=flushed,
        before=before,
    )


def row(name="layer", error=0.01, *, gradient=None, floor=None, only=""):
    gradients = () if gradient is None else (compared(gradient),)
    return ModuleRow(name=name, kind="Linear", outputs=(compared(error, floor=floor),), gradients=gradients, only=only)


def parameter(name="layer.weight", error=0.01, *, share=1.0, floor=None, **rest):
    return ParameterRow(name=name, compared=compared(error, own=None, floor=floor, **rest), share=share)


def side(precision="bf16", **rest):
    facts = {"label": precision, "device": "cpu", "roundoff": 2**-8, "gradient_roundoff": 2**-8, "loss": 1.0}
    return SideFacts(precision=precision, **facts | rest)


@pytest.fixture
def findings():
    """What the room's rules say of a difference with these parts."""

    def findings(b="bf16", **parts):
        facts = {"b": side(b) if isinstance(b, str) else b}
        return run_checks(StepDifference(name="fn", a=side("fp32"), **facts | parts))

    return findings
