"""Incidents made up by hand, one of each kind, as a replay would put them together."""

from dataclasses import replace

from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import run_checks
from ampwise.numbers.census.algebra import Census
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import BadTensor, FixTrial, OptimizerFacts, Origin, RoundedLiteral, TensorSummary

HERE = CallSite(file="/home/me/train.py", line=12, function="forward", called_from="train.py:40")
LATER = CallSite(file="/home/me/train.py", line=31)
NAN, INF = float("nan"), float("inf")


def values(name="self", dtype="fp16", shape=(8, 16), low=-3.25, high=250.0, **counts):
    total = 1
    for size in shape:
        total *= size
    others = sum(counts.values())
    census = Census(binades={0: total - others} if total > others else {}, amax=high, amin=0.5, **counts)
    return TensorSummary(dtype=dtype, shape=shape, low=low, high=high, census=census, name=name)


def origin(op="aten.addmm.default", made="inf", dtype="fp16", **more):
    facts = {"site": HERE, "module": "blocks.3.fc", "module_class": "Linear"}
    return Origin(op=op, made=made, dtype=dtype, **(facts | more))


ADDMM = origin(
    inputs=(values("mat1"), values("mat2", shape=(16, 4), low=-4.0, high=4.5)),
    output=values("", shape=(8, 4), infs=3),
    exact="finite",
    exact_largest=81920.0,
)
SOFTMAX = origin("aten._softmax.default", "nan", site=LATER, module="blocks.3.attention", module_class="Attention")
HELPED = FixTrial(what="`blocks.3.fc` in FP32", code="engine = Engine(model, optimizer)", finite=True, loss=2.3125)
NO_HELP = FixTrial(what="the step in BF16", code="engine = Engine()", finite=False, loss=NAN, bad_gradients=3)
GRADIENTS = tuple(f"blocks.{number}.weight" for number in range(12))
FAILED = Failure(loss=NAN, bad_gradients=GRADIENTS, gradients=12, precision="fp16", scale=65536.0, step=40)
IN_BACKWARD = FAILED.but(symptom="gradients", loss=1.5)
BAD_WEIGHT = BadTensor(
    what="parameter", name="head.weight", values=values("", nans=5), module_class="Linear", first_use=ADDMM
)

MASKED = replace(values(infs=48), negative_infs=48)

EXAMPLES = {
    "bad-batch": FAILED.but(
        source=BadTensor(
            what="batch",
            name="batch['pixels']",
            values=values("", dtype="fp32", nans=3, infs=1),
            rows=(5, 17),
            bad_rows=2,
            first_use=origin("aten.convolution.default", "nan", "fp16", module="stem", module_class="Conv2d"),
        )
    ),
    "bad-weights": FAILED.but(source=BAD_WEIGHT),
    "poisoned-statistics": FAILED.but(
        source=BadTensor(
            what="buffer", name="stem.bn.running_var", values=values("", nans=1), module_class="BatchNorm2d"
        )
    ),
    "half-overflow": FAILED.but(origin=ADDMM, nan_origin=SOFTMAX, trials=(HELPED, NO_HELP)),
    "overflow": FAILED.but(
        origin=origin(
            "aten.exp.default", dtype="fp32", exact="finite", exact_largest=2.6e43, inputs=(values(high=100.0),)
        )
    ),
    "outside-domain": FAILED.but(
        origin=origin(
            "aten.log.default",
            outside_domain=3,
            inputs=(values(low=0.0, high=1.0, zeros=3),),
            literals=(RoundedLiteral(value=1e-8, becomes=0.0, dtype="fp16", site=HERE),),
        )
    ),
    "division-by-zero": FAILED.but(
        origin=origin("aten.div.Tensor", zero_divisors=12, inputs=(values(), values("other", shape=(64,), zeros=12)))
    ),
    "fully-masked-row": FAILED.but(
        origin=origin("aten._softmax.default", "nan", masked_rows=3, from_infinities=True, inputs=(MASKED,))
    ),
    "mean-of-nothing": FAILED.but(origin=origin("aten.nll_loss_forward.default", "nan", "fp32", module="")),
    "infinite-derivative": IN_BACKWARD.but(
        origin=origin("aten.div.Tensor", phase="backward", live=False, derivative_of="sqrt", dtype="fp32", exact="inf")
    ),
    "gradient-overflow": IN_BACKWARD.but(
        origin=origin(
            "aten.mm.default",
            phase="backward",
            live=False,
            derivative_of="addmm",
            exact="finite",
            exact_largest=1.5e6,
        ),
        fitting_scale=2048.0,
    ),
    "optimizer-division": FAILED.but(
        source=BAD_WEIGHT,
        optimizer=OptimizerFacts(
            name="AdamW", eps=1e-8, eps_becomes=0.0, dtype="fp16", steps=7, zero_denominators=5, bad_weights=5
        ),
    ),
    "custom-op": FAILED.but(origin=origin("mine.fused_attention.default")),
    "from-another-rank": FAILED.but(
        origin=origin("c10d.allreduce_.default", "nan", "fp32", module=""), rank=2, ranks=4
    ),
    "not-reproduced": FAILED.but(not_reproduced="the same step twice, then with deterministic algorithms"),
    "swallowed-infinity": FAILED.but(
        symptom="value",
        loss=1.5,
        bad_gradients=(),
        swallowed=True,
        origin=origin("aten.var.correction", exact="finite"),
    ),
    "cancelled-infinities": FAILED.but(
        origin=origin(
            "aten.sub.Tensor", "nan", from_infinities=True, inputs=(values(infs=2), values("other", shape=(8,), infs=2))
        )
    ),
    "unstable-loss": FAILED.but(
        origin=origin("aten.log.default", module="", module_class="", outside_domain=1, inputs=(values(shape=(16,)),))
    ),
    "kernel-fault": IN_BACKWARD.but(
        origin=origin(
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            "nan",
            "bf16",
            phase="backward",
            live=False,
            inputs=(values("query", "bf16", (1, 1, 704, 64)), values("key", "bf16", (1, 1, 704, 64))),
            exact="finite",
            exact_largest=0.25,
        ),
        trials=(FixTrial(what="attention without cuDNN", code="off()", finite=True, change="kernel", loss=1.5),),
    ),
    "compiler-fault": FAILED.but(
        trials=(
            FixTrial(
                what='backend="aot_eager"',
                code='torch.compile(model, backend="aot_eager")',
                finite=True,
                change="compiler",
                argument="the code that the backend generates",
                loss=1.5,
            ),
        ),
    ),
    "exploding-update": FAILED.but(
        origin=origin("aten.addmm.default", dtype="fp32", exact="finite", exact_largest=1e50),
        optimizer=OptimizerFacts(name="SGD", lr=50.0, weight_decay=0.1, steps=3, first_norm=3.5, norm=2e8),
    ),
}


def findings(failure):
    """What the rules about operations say."""
    return run_checks(failure)


def finding(failure):
    (one,) = findings(failure)
    return one
