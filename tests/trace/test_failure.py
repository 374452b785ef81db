"""The kind of an failure follows from its facts; words for tensors."""

import json

import pytest
import torch

from ampwise.finding.call_site import CallSite
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.op_families import FAMILIES, base_name, family_of, is_collective, is_custom
from ampwise.trace.failure import KINDS, Failure
from ampwise.trace.failure_facts import BadTensor, OptimizerFacts, Origin, TensorSummary, known_as_json


def born(op, made="inf", dtype="fp16", **facts):
    return Failure(origin=Origin(op=op, made=made, dtype=dtype, **({"module": "fc", "module_class": "Linear"} | facts)))


def came(what, **optimizer):
    facts = OptimizerFacts(**optimizer) if optimizer else None
    return Failure(source=BadTensor(what=what, name="x"), optimizer=facts)


LOG = "aten.log.default"
EXP = "aten.exp.default"
DIV = "aten.div.Tensor"
SOFTMAX = "aten._softmax.default"
MM = "aten.mm.default"
BACKWARD = {"phase": "backward", "live": False}


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure(), "not-reproduced"),
        (born(MM).but(not_reproduced="twice"), "not-reproduced"),
        (came("batch"), "bad-batch"),
        (came("other"), "bad-batch"),
        (came("parameter"), "bad-weights"),
        (came("buffer"), "poisoned-statistics"),
        # An optimizer has made nothing that took no step, or divides by nothing, or none of whose divisors was 0.
        (came("parameter", name="Adam", eps=1e-8, steps=0), "bad-weights"),
        (came("parameter", name="SGD", steps=3), "bad-weights"),
        (came("parameter", name="Adam", eps=1e-8, steps=3, zero_denominators=0), "bad-weights"),
        (came("parameter", name="Adam", eps=1e-8, steps=3, zero_denominators=4), "optimizer-division"),
        (came("parameter", name="Adam", eps=1e-8, steps=3, zero_denominators=4, lr=float("nan")), "bad-weights"),
        (came("parameter", name="Adagrad", eps=1e-10, steps=3), "optimizer-division"),
        (came("buffer", name="Adam", eps=1e-8, steps=3), "poisoned-statistics"),
        (born("aten.addcdiv_.default", phase="optimizer"), "optimizer-division"),
        (born(MM, exact="finite", exact_largest=1e5), "half-overflow"),
        (born(MM, dtype="fp8_e4m3fn", exact="finite", exact_largest=1e5), "half-overflow"),
        (born(MM, exact="finite", exact_largest=1e39), "overflow"),
        (born(MM, exact="inf"), "overflow"),
        (born(MM), "half-overflow"),  # nobody looked
        (born(MM, dtype="bf16", exact="finite", exact_largest=1e39), "overflow"),
        (born(MM, dtype="fp32", exact="finite", exact_largest=1e39), "overflow"),
        (born(LOG, outside_domain=1), "outside-domain"),
        (born("aten.sqrt.default", "nan"), "outside-domain"),
        (born("aten.acos.default", "nan", outside_domain=2), "outside-domain"),
        (born(DIV, zero_divisors=1, exact="inf"), "division-by-zero"),
        (born(DIV, "nan", dtype="fp32"), "division-by-zero"),
        (born(DIV, exact="finite", exact_largest=1e5), "half-overflow"),  # a small divisor is not 0
        (born(SOFTMAX, "nan", from_infinities=True), "fully-masked-row"),
        (born(SOFTMAX, "nan"), "fully-masked-row"),
        (born("aten.sub.Tensor", "nan", from_infinities=True), "cancelled-infinities"),
        (born("aten.full.default", by_hand=True), "cancelled-infinities"),
        (born("aten.mean.default", "nan"), "mean-of-nothing"),
        (born("aten.mean.default", "inf", exact="finite", exact_largest=7e4), "half-overflow"),
        (born(DIV, derivative_of="sqrt", exact="inf", **BACKWARD), "infinite-derivative"),
        (born(MM, exact="finite", **BACKWARD), "gradient-overflow"),
        (born(MM, **BACKWARD), "gradient-overflow"),  # nobody looked: in FP16 the likelier of the two
        (born(MM, dtype="fp32", **BACKWARD), "infinite-derivative"),
        # A custom Function's backward is code of the user's that runs: judged as such.
        (born(DIV, zero_divisors=1, phase="backward", live=True), "division-by-zero"),
        (born("mine.op.default"), "custom-op"),
        (born("c10d.allreduce_.default", "nan"), "from-another-rank"),
        (born("_c10d_functional.all_reduce.default").but(swallowed=True), "from-another-rank"),
        (born("aten.var.correction").but(swallowed=True), "swallowed-infinity"),
        (born(EXP, module="", module_class=""), "unstable-loss"),
        (born(EXP, module="criterion", module_class="InfoNCELoss"), "unstable-loss"),
        (born(LOG, module="", module_class="", outside_domain=1), "unstable-loss"),
        # A function without a model has no loss to tell from the rest.
        (born(LOG, module_class="", outside_domain=1).but(has_modules=False), "outside-domain"),
        (born(EXP, exact="finite", exact_largest=1e5), "half-overflow"),
    ],
)
def test_kinds(failure, kind):
    assert failure.kind == kind
    assert kind in KINDS


def test_the_culprit_is_where_it_was_born_or_read_first():
    use = Origin(op=MM, made="nan", dtype="fp16", site=CallSite(file="a.py", line=3))
    assert Failure(source=BadTensor(what="batch", first_use=use)).site == use.site
    assert born(MM).culprit.op == MM
    assert Failure().culprit is None
    assert Failure().site == CallSite()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (TensorSummary(dtype="fp16"), "fp16 number"),
        (TensorSummary(dtype="fp32", low=0.0, high=0.0, census=Census(zeros=1)), "fp32 number 0"),
        (TensorSummary(dtype="fp32", census=Census(nans=1)), "fp32 number NaN"),
        (TensorSummary(dtype="fp16", shape=(2, 3), low=-1.0, high=65504.0), "fp16 2×3, -1 to 65,504"),
        (
            TensorSummary(dtype="fp16", shape=(2,), low=1.0, high=1.0, census=Census(binades={-1: 1}, nans=1)),
            "fp16 2, 1, 1 NaN",
        ),
        (TensorSummary(dtype="fp16", shape=(2,), census=Census(zeros=2)), "fp16 2, all 0"),
        (
            TensorSummary(dtype="fp16", shape=(2000,), census=Census(zeros=500, infs=1500)),
            "fp16 2000, 500 zeros, 1,500 inf",
        ),
        (
            TensorSummary(dtype="fp16", shape=(9,), negative_infs=2, census=Census(zeros=1, infs=3, binades={0: 5})),
            "fp16 9, 1 zero, 1 inf, 2 -inf",
        ),
        (TensorSummary(dtype="fp16", shape=(3,), negative_infs=3, census=Census(infs=3)), "fp16 3, all -inf"),
    ],
)
def test_words_for_a_tensor(values, text):
    assert str(values) == text


def test_plain_leaves_out_what_is_not_known_and_has_words_for_the_rest():
    evidence = {"a": None, "b": "", "c": (), "d": 0, "e": float("nan"), "f": [{"low": float("-inf")}], "g": (1, 2)}
    assert known_as_json(evidence) == {"d": 0, "e": "NaN", "f": [{"low": "-Infinity"}], "g": [1, 2]}
    json.dumps(known_as_json(evidence), allow_nan=False)


def test_families_are_of_operations_that_torch_has():
    names = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    aten = {name.strip("_") for namespace, _, name in names if namespace == "aten"}
    unknown = frozenset().union(*FAMILIES.values()) - aten
    assert not unknown


@pytest.mark.parametrize(
    ("op", "name", "family"),
    [
        ("aten._softmax.default", "softmax", "softmax"),
        ("aten.div_.Tensor", "div", "division"),
        ("aten._foreach_div_.ScalarList", "div", "division"),
        ("aten._to_copy.default", "to_copy", "cast"),
        ("aten.gelu.default", "gelu", ""),
    ],
)
def test_names_and_families(op, name, family):
    assert (base_name(op), family_of(op)) == (name, family)


def test_whose_operation_it_is():
    assert is_custom("mine.exp.default")
    assert not is_custom("aten.exp.default")
    assert not is_custom("c10d.allreduce_.default")
    assert is_collective("_c10d_functional.all_reduce.default")
    assert not is_collective("aten.sum.default")
