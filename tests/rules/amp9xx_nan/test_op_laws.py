"""Whatever a replay puts together: one rule speaks, its place is one, its evidence is plain, its fix is code."""

import ast
import json

from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding.call_site import CallSite
from ampwise.finding.strict_json import dumps, to_json_types
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.op_families import FAMILIES
from ampwise.trace.failure import KINDS, Failure
from ampwise.trace.failure_facts import BadTensor, FixTrial, OptimizerFacts, Origin, RoundedLiteral, TensorSummary
from ampwise.trace.remedies import CHANGES, remedies_for

from .failures import findings

counts = st.integers(0, 1000)
floats = st.floats(allow_nan=True, allow_infinity=True)
maybe = st.none() | floats
names = st.text(max_size=12) | st.sampled_from(["", "blocks.3.fc", 'a"b', "a\\", "x\ny", "\ud800"])
dtypes = st.sampled_from(["fp16", "bf16", "fp32", "fp64", "fp8_e4m3fn", "fp8_e5m2", "int64", "complex64"])
ops = st.sampled_from(
    [f"aten.{name}.default" for names in FAMILIES.values() for name in sorted(names)]
    + ["aten.gelu.default", "mine.attention.default", "c10d.allreduce_.default", "aten._foreach_div_.ScalarList"]
)
sites = st.builds(CallSite, file=st.none() | names, line=st.none() | st.integers(-1, 500))
censuses = st.builds(
    Census, binades=st.dictionaries(st.integers(-40, 40), counts, max_size=3), zeros=counts, infs=counts, nans=counts
)
tensors = st.builds(
    TensorSummary,
    dtype=dtypes,
    shape=st.lists(counts, max_size=3).map(tuple),
    low=maybe,
    high=maybe,
    census=st.none() | censuses,
    name=names,
    negative_infs=counts,
)
origins = st.builds(
    Origin,
    op=ops,
    made=st.sampled_from(["inf", "nan"]),
    dtype=dtypes,
    phase=st.sampled_from(["forward", "backward", "optimizer"]),
    site=sites,
    live=st.booleans(),
    module=names,
    module_class=names,
    derivative_of=st.sampled_from(["", "sqrt", "div", "linalg_vector_norm", "pow", "addmm"]),
    inputs=st.lists(tensors, max_size=5).map(tuple),
    output=st.none() | tensors,
    by_hand=st.booleans(),
    from_infinities=st.booleans(),
    exact=st.sampled_from([None, "finite", "inf", "nan"]),
    exact_largest=maybe,
    zero_divisors=counts,
    outside_domain=counts,
    masked_rows=counts,
    literals=st.lists(
        st.builds(RoundedLiteral, value=floats, becomes=floats, dtype=dtypes, site=sites), max_size=2
    ).map(tuple),
)
sources = st.builds(
    BadTensor,
    what=st.sampled_from(["parameter", "buffer", "batch", "other", "number"]),
    name=names,
    values=st.none() | tensors,
    module_class=names,
    rows=st.lists(counts, max_size=4).map(tuple),
    bad_rows=counts,
    first_use=st.none() | origins,
)
optimizers = st.builds(
    OptimizerFacts,
    name=st.sampled_from(["AdamW", "SGD"]),
    eps=maybe,
    eps_becomes=maybe,
    dtype=dtypes,
    steps=counts,
    zero_denominators=st.none() | counts,
    bad_weights=counts,
    lr=maybe,
)
trials = st.builds(
    FixTrial, what=names, code=st.just("y = f(x)"), finite=st.booleans(), loss=maybe, bad_gradients=counts
)
failures = st.builds(
    Failure,
    symptom=st.sampled_from(["loss", "gradients", "result", "value"]),
    loss=maybe,
    bad_gradients=st.lists(names, max_size=12).map(tuple),
    gradients=counts,
    origin=st.none() | origins,
    nan_origin=st.none() | origins,
    source=st.none() | sources,
    precision=st.sampled_from(["fp16", "bf16", "fp32"]),
    scale=floats,
    fitting_scale=maybe,
    step=st.none() | counts,
    rank=st.none() | counts,
    ranks=st.integers(1, 8),
    has_modules=st.booleans(),
    swallowed=st.booleans(),
    not_reproduced=st.sampled_from(["", "", "twice"]),
    remarks=st.lists(names, max_size=2).map(tuple),
    optimizer=st.none() | optimizers,
    trials=st.lists(trials, max_size=3).map(tuple),
)


@given(failures)
def test_one_rule_speaks_plainly(failure):
    (finding,) = findings(failure)
    assert failure.kind in KINDS
    assert finding.rule.name == failure.kind
    assert len(finding.message.splitlines()) == 1
    if failure.origin is not None and failure.source is None and failure.kind != "not-reproduced":
        assert failure.origin.name in finding.message
        assert finding.evidence["op"] == failure.origin.op
    # The evidence is plain data.
    assert to_json_types(finding.evidence) == finding.evidence
    assert json.loads(dumps(finding.evidence)) == finding.evidence
    assert None not in finding.evidence.values()
    # Code in a fix, and in every remedy that can be tried, is Python.
    assert finding.fix.strip()
    lines = finding.fix.split("\n")
    ast.parse("\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ")))
    for remedy in remedies_for(failure):
        ast.parse(remedy.code)
        assert remedy.change in CHANGES
        assert remedy.what
