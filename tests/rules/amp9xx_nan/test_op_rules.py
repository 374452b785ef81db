"""Each kind of failure as its rule tells it: in words for a person, in data for a machine."""

import ast
import io
import json
import linecache
from dataclasses import replace

import pytest

from ampwise.cli import main
from ampwise.finding import Place, Severity
from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import rule_modules
from ampwise.finding.strict_json import dumps
from ampwise.numbers.number_text import number_text
from ampwise.report.printers import output_formats, print_findings
from ampwise.rules.amp9xx_nan.failure_text import operand_texts
from ampwise.runs.findings_json import findings_data, read_findings
from ampwise.runs.rows import CountedFinding
from ampwise.trace.failure import KINDS
from ampwise.trace.failure_facts import OptimizerFacts
from ampwise.trace.remedies import remedies_for

from ...for_each import for_each
from .failures import ADDMM, BAD_WEIGHT, EXAMPLES, FAILED, HELPED, IN_BACKWARD, INF, NO_HELP, finding, origin, values

RULES = {module.RULE.name: module.RULE for module in rule_modules() if hasattr(module, "check_op")}
WARNINGS = {"not-reproduced", "swallowed-infinity"}
END = "the loss → 12 of 12 gradients"


def told_of(found):
    """What happened, and the evidence of it: what the operation received, and where the value went."""
    inputs = found.evidence.get("inputs")
    return "; ".join(filter(None, (found.message, inputs and f"it received {inputs}", found.evidence.get("path"))))


MESSAGES = {
    "bad-batch": (
        "`batch['pixels']` was passed to the step with 3 NaN and 1 inf among 128 values, in 2 samples (5, 17, counted "
        f"from 0), and was first read by the convolution of `stem` (Conv2d); `batch['pixels']` → {END}"
    ),
    "bad-weights": (
        "the parameter `head.weight` (Linear) had 5 NaN among 128 values before the step; the matmul (addmm) of "
        f"`blocks.3.fc` (Linear) was the first to read it; `head.weight` → {END}"
    ),
    "poisoned-statistics": (
        "the buffer `stem.bn.running_var` (BatchNorm2d) had 1 NaN among 128 values before the step; "
        f"`stem.bn.running_var` → {END}"
    ),
    "half-overflow": (
        "the matmul (addmm) of `blocks.3.fc` (Linear) overflows in FP16: the exact result reaches 81,920, but FP16 "
        "ends at 65504; it received input (FP16 8×16, -3.25 to 250) and weight (FP16 16×4, -4 to 4.5); inf here → NaN "
        f"at train.py:31 (softmax) → {END}"
    ),
    "overflow": (
        "the exponential (exp) of `blocks.3.fc` (Linear) overflows in FP32: the exact result reaches 2.6e+43, but "
        f"FP32 ends at 3.4e+38; it received input (FP16 8×16, -3.25 to 100); inf here → {END}"
    ),
    "outside-domain": (
        "the logarithm (log) of `blocks.3.fc` (Linear) gives -inf in FP16: 3 of 128 arguments are 0; 1e-08 "
        f"is 0 in FP16; it received input (FP16 8×16, 0 to 1, 3 zeros); -inf here → {END}"
    ),
    "division-by-zero": (
        "the division (div) of `blocks.3.fc` (Linear) gives inf in FP16: 12 of 64 divisors are 0; it received "
        f"dividend (FP16 8×16, -3.25 to 250) and divisor (FP16 64, -3.25 to 250, 12 zeros); inf here → {END}"
    ),
    "fully-masked-row": (
        "the softmax of `blocks.3.fc` (Linear) gives NaN: 3 rows are all -inf, so the softmax is 0/0; it received "
        f"input (FP16 8×16, -3.25 to 250, 48 -inf); NaN here → {END}"
    ),
    "mean-of-nothing": (
        "the cross entropy (nll_loss_forward) gives NaN: all labels are `ignore_index` or have weight 0, and the mean "
        f"of nothing is 0/0; NaN here → {END}"
    ),
    "infinite-derivative": (
        "the derivative of `sqrt` at train.py:12 (computed by div), in `blocks.3.fc` (Linear), is inf, though the "
        "forward pass is finite there; inf here → 12 of 12 gradients"
    ),
    "gradient-overflow": (
        "the derivative of `addmm` at train.py:12 (computed by mm), in `blocks.3.fc` (Linear), overflows in FP16 at a "
        "loss scale of 65536: the exact result reaches 1,500,000, but FP16 ends at 65504; it would fit at a scale of "
        "2048; inf here → 12 of 12 gradients"
    ),
    "optimizer-division": (
        "AdamW left `head.weight` with 5 NaN among 128 values although the gradients were finite: its eps of 1e-08 is "
        f"0 in FP16 and the second moment of 5 bad weights is 0, so it divides by 0; `head.weight` → {END}"
    ),
    "custom-op": (
        "`fused_attention` of `blocks.3.fc` (Linear), from `mine`, returns inf in FP16 though its inputs are finite; "
        f"its internals cannot be traced; inf here → {END}"
    ),
    "from-another-rank": f"`allreduce`, a collective among 4 ranks, received NaN from rank 2; NaN here → {END}",
    "not-reproduced": (
        "the loss of this step was not finite, but its replay is finite; tried: the same step twice, then with "
        "deterministic algorithms"
    ),
    "swallowed-infinity": (
        "the variance (var) of `blocks.3.fc` (Linear) gives inf in FP16: FP16 ends at 65504; later operations hide "
        "it, so no step was skipped; inf here → finite but wrong values"
    ),
    "cancelled-infinities": (
        "the difference (sub) of `blocks.3.fc` (Linear) turns intentional infinities in FP16 into NaN: inf - inf, "
        "inf/inf or 0 · inf; it received left (FP16 8×16, -3.25 to 250, 2 inf) and right (FP16 8, -3.25 to 250, 2 "
        f"inf); NaN here → {END}"
    ),
    "unstable-loss": (
        "in the loss, the logarithm (log) gives -inf in FP16: 1 of 16 arguments is below 0; it received input "
        f"(FP16 16, -3.25 to 250); -inf here → {END}"
    ),
    "kernel-fault": (
        "the attention (scaled_dot_product_cudnn_attention_backward) of `blocks.3.fc` (Linear) returns NaN in BF16 for "
        "finite inputs: the kernel is at fault, not the model; in FP64 the result is no larger than 0.25; it received "
        "input (BF16 1×1×704×64, -3.25 to 250) twice; NaN here → 12 of 12 gradients"
    ),
    "compiler-fault": (
        "the loss of this step is not finite as compiled, and finite in eager code: the code that the backend "
        "generates is at fault"
    ),
    "exploding-update": (
        "the weights' norm grew from 3.5 to 2e+08 in 3 steps of SGD (lr 50, weight decay 0.1, their product is 5); "
        "then the matmul (addmm) of `blocks.3.fc` (Linear) gives inf at train.py:12; inf here → the loss → 12 of 12 "
        "gradients"
    ),
}


def test_each_kind_has_its_rule_and_codes_are_in_their_order():
    assert [(rule.code, rule.name) for rule in RULES.values()] == [
        (f"AMP9{number:02}", kind) for number, kind in zip([*range(1, 20), 21, 22], KINDS, strict=True)
    ]
    assert {name for name, rule in RULES.items() if rule.severity is Severity.WARNING} == WARNINGS
    assert all(rule.severity is Severity.ERROR for name, rule in RULES.items() if name not in WARNINGS)
    assert set(EXAMPLES) == set(MESSAGES) == set(KINDS)


@for_each("kind", KINDS)
def test_a_kind_is_reported_by_its_rule_alone(kind):
    found = finding(EXAMPLES[kind])
    assert found.rule.name == kind
    assert told_of(found) == MESSAGES[kind]


@for_each("kind", KINDS)
def test_examples_of_rules_are_python(kind):
    for example in (RULES[kind].bad, RULES[kind].good):
        ast.parse(example)
    assert RULES[kind].bad != RULES[kind].good


# The place


def test_the_place_is_the_line_the_module_and_the_step():
    place = Place(file="/home/me/train.py", line=12, module="blocks.3.fc", step=40)
    assert finding(EXAMPLES["half-overflow"]).place == place


def test_bad_weights_have_the_parameter():
    assert finding(EXAMPLES["bad-weights"]).place.parameter == "head.weight"
    assert finding(EXAMPLES["bad-batch"]).place.parameter is None


def test_the_rank_is_reported_where_there_are_several():
    assert finding(EXAMPLES["half-overflow"].but(rank=0)).place.rank is None
    assert finding(EXAMPLES["half-overflow"].but(rank=3, ranks=4)).place.rank == 3


@for_each("site", [CallSite(file="a.py", line=0), CallSite(file="a.py", line=-1), CallSite(line=3), CallSite()])
def test_a_line_that_is_none_is_left_out(site):
    place = finding(FAILED.but(origin=origin(site=site))).place
    assert place == Place(file=site.file, module="blocks.3.fc", step=40)


# What other facts make of the words


def message(failure, kind):
    found = finding(failure)
    assert found.rule.name == kind
    return told_of(found)


def test_an_overflow_on_the_way_is_distinguished_from_one_of_the_result():
    told = message(
        FAILED.but(origin=origin("aten.linalg_vector_norm.default", exact="finite", exact_largest=900.0)),
        "half-overflow",
    )
    assert told.startswith(
        "the norm (linalg_vector_norm) of `blocks.3.fc` (Linear) overflows in FP16: the exact result is no larger "
        "than 900, but FP16 ends at 65504, and an intermediate result exceeds it; inf here"
    )


def test_what_overflows_in_fp64_too():
    told = message(FAILED.but(origin=origin("aten.exp.default", dtype="fp32", exact="inf")), "overflow")
    assert "overflows in FP32: in FP64 it is inf too; inf here" in told


def test_an_infinity_written_by_hand_is_no_overflow():
    told = message(FAILED.but(origin=origin("aten.full.default", dtype="fp32", by_hand=True)), "cancelled-infinities")
    assert told.startswith("`full` of `blocks.3.fc` (Linear) writes inf, as coded in the source")


def test_an_unknown_operation_has_torchs_name():
    told = message(FAILED.but(origin=origin("aten.gelu.default", dtype="fp32", module="")), "overflow")
    assert told.startswith("`gelu` overflows in FP32: FP32 ends at 3.4e+38; inf here")


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("aten.std.correction", "the standard deviation (std) gives NaN: there is at most one value"),
        ("aten.mean.default", "the mean gives NaN: there are no values"),
    ],
)
def test_means_and_deviations_of_nothing(op, words):
    assert message(FAILED.but(origin=origin(op, "nan", "fp32", module="")), "mean-of-nothing").startswith(words)


def test_a_divisor_that_nobody_counted():
    told = message(FAILED.but(origin=origin("aten.reciprocal.default", dtype="fp32", exact="inf")), "division-by-zero")
    assert "the reciprocal of `blocks.3.fc` (Linear) gives inf in FP32: the divisor is 0, or close to it" in told


@for_each(
    ("rows", "bad_rows", "words"),
    [
        ((), 0, "128 values, and"),
        ((3,), 1, ", in sample 3, counted from 0, and"),
        ((0, 1), 40, ", in 40 samples (0, 1, …, counted from 0), and"),
    ],
)
def test_which_samples(rows, bad_rows, words):
    source = EXAMPLES["bad-batch"].source
    changed = type(source)(what="batch", name="x", values=source.values, first_use=ADDMM, rows=rows, bad_rows=bad_rows)
    assert words in message(FAILED.but(source=changed), "bad-batch")


def test_what_the_function_brings_along_is_no_batch_of_the_step():
    source = type(BAD_WEIGHT)(what="other", values=values("", nans=1))
    told = message(FAILED.but(source=source), "bad-batch")
    assert told == "a tensor is used by the step and comes from outside it with 1 NaN among 128 values"


@for_each(
    ("steps", "words"),
    [
        (0, ": since the start, because SGD has not taken a step yet"),
        (1, ", after 1 step of SGD"),
        (9, ", after 9 steps of SGD"),
    ],
)
def test_since_when_weights_are_bad(steps, words):
    facts = type(EXAMPLES["optimizer-division"].optimizer)(name="SGD", steps=steps, zero_denominators=0)
    assert f"before the step{words}; the matmul" in message(
        FAILED.but(source=BAD_WEIGHT, optimizer=facts), "bad-weights"
    )


def test_an_optimizers_own_operation():
    told = message(
        FAILED.but(origin=origin("aten.addcdiv_.default", "nan", phase="optimizer", module="")), "optimizer-division"
    )
    assert told.startswith("the optimizer: the division (addcdiv) in its step gives NaN; NaN here")


def test_a_rank_that_is_not_known():
    told = message(EXAMPLES["from-another-rank"].but(rank=None), "from-another-rank")
    assert "received NaN from another rank; it is unknown which one" in told


def test_nothing_to_blame_is_said():
    assert message(FAILED, "not-reproduced") == (
        "the loss of this step was not finite, but the replay found no operation that caused it"
    )
    assert message(IN_BACKWARD, "not-reproduced").startswith("gradients of this step were not finite, but")


def test_advice_about_a_gpu_a_compiler_or_a_machine_is_given_only_where_there_is_one():
    plain = FAILED.but(not_reproduced="twice", device="cpu")
    words = ("use_deterministic_algorithms", "torch.compile", "memory")
    told = [
        finding(each).fix for each in (plain, plain.but(device="cuda"), plain.but(compiled=True), plain.but(ranks=2))
    ]
    assert all(fix.startswith("The loss function must give the same result") for fix in told)
    assert [[word for word in words if word in fix] for fix in told] == [[], *([word] for word in words)]


@for_each(
    ("scale", "fits", "words"),
    [
        (1.0, None, "at a loss scale of 1: the exact result reaches 1,500,000, but FP16 ends at 65504; inf"),
        (1.0, 0.25, "FP16 ends at 65504; even a scale of 1 is too high: it would need 0.25; inf"),
        (1024.0, 2048.0, "FP16 ends at 65504; inf"),
    ],
)
def test_scales_that_would_fit(scale, fits, words):
    failure = EXAMPLES["gradient-overflow"].but(scale=scale, fitting_scale=fits)
    assert words in message(failure, "gradient-overflow")
    assert "Start at" not in finding(failure).fix


def test_without_a_derivative_the_backward_operation_is_named():
    told = message(
        IN_BACKWARD.but(origin=origin("aten.mul.Tensor", phase="backward", live=False, exact="inf")),
        "infinite-derivative",
    )
    assert told.startswith("a derivative, computed by the product (mul) of `blocks.3.fc` (Linear), is inf")


# The way out


def test_what_helped_comes_first_with_its_code_before_and_after():
    assert finding(EXAMPLES["half-overflow"]).fix.split("\n") == [
        "Tried in the replay: `blocks.3.fc` in FP32 (loss NaN → 2.312, gradients finite).",
        "    engine = Engine(model, optimizer)",
        "Tried in the replay, but did not help: the step in BF16 (loss NaN, 3 gradients not finite).",
    ]


def test_that_nothing_helped_is_said():
    assert finding(EXAMPLES["half-overflow"].but(trials=(NO_HELP,))).fix.split("\n") == [
        RULES["half-overflow"].fix,
        "Tried in the replay, but did not help: the step in BF16 (loss NaN, 3 gradients not finite).",
    ]


def test_what_was_not_tried_is_said_to_be_so():
    assert finding(EXAMPLES["half-overflow"].but(trials=())).fix.split("\n") == [
        RULES["half-overflow"].fix,
        "Possible fix, not tried: `blocks.3.fc` in FP32.",
        '    engine = ampwise.Engine(model, optimizer, ampwise.Policy("fp16").keep("fp32", "blocks.3.fc"))',
        '    ampwise.Policy("fp16").keep("fp32", "blocks.3.fc").apply(model)  # in a custom loop',
    ]


def test_what_would_fix_a_swallowed_infinity_is_what_fixes_the_overflow():
    failure = EXAMPLES["swallowed-infinity"]
    assert finding(failure).fix.split("\n") == [
        RULES["swallowed-infinity"].fix,
        "Possible fix, not tried: `blocks.3.fc` in FP32.",
        '    engine = ampwise.Engine(model, optimizer, ampwise.Policy("fp16").keep("fp32", "blocks.3.fc"))',
        '    ampwise.Policy("fp16").keep("fp32", "blocks.3.fc").apply(model)  # in a custom loop',
    ]
    assert not remedies_for(failure), "nothing to try: the step is finite"


def test_a_loss_that_stays_the_same_is_reported_once():
    fix = finding(EXAMPLES["gradient-overflow"].but(trials=(HELPED,), loss=2.3125)).fix
    assert "`blocks.3.fc` in FP32 (loss 2.312, gradients finite)." in fix


def test_a_scale_that_fits_is_advised():
    fix = finding(EXAMPLES["gradient-overflow"]).fix
    assert fix.startswith(
        'Start at a loss scale that fits: `ampwise.Engine(model, optimizer, scaling={"init_scale": 2048})`.'
    )


def test_statistics_are_reset_by_code_that_runs():
    (line,) = [line for line in finding(EXAMPLES["poisoned-statistics"]).fix.split("\n") if line.startswith(" ")]
    from torch import nn

    model = nn.Module()
    model.stem = nn.Module()
    model.stem.bn = nn.BatchNorm2d(2)
    model.stem.bn.running_var.fill_(INF)
    exec(line.strip(), {"model": model})
    assert model.stem.bn.running_var.isfinite().all()


def test_other_buffers_have_no_statistics_to_reset():
    source = type(BAD_WEIGHT)(what="buffer", name="stem.positions", values=values("", nans=1))
    assert finding(FAILED.but(source=source)).fix.startswith("It is not a running statistic")


def test_eps_is_fixed_where_eps_was_the_fault():
    assert (
        "\n    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)"
        in finding(EXAMPLES["optimizer-division"]).fix
    )
    facts = OptimizerFacts(
        name="Adam", eps=0.0, eps_becomes=0.0, dtype="fp32", steps=7, zero_denominators=2, bad_weights=5
    )
    without = finding(EXAMPLES["optimizer-division"].but(optimizer=facts))
    assert "finite: its eps is 0 and the second moment of 2 of 5 bad weights is 0, so it" in without.message
    assert without.fix.endswith("\n    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)")


def test_a_loss_that_is_finite_and_absurd_is_said_to_be_so():
    fix = finding(EXAMPLES["overflow"].but(trials=(replace(HELPED, loss=5.9e22),))).fix
    assert fix.startswith("Tried in the replay: `blocks.3.fc` in FP32 (finite, but the loss is 5.9e+22).\n")
    assert "gradients finite" in finding(EXAMPLES["overflow"].but(trials=(replace(HELPED, loss=9e5),))).fix


@for_each("rate", [1e38, INF, float("nan")])
def test_a_learning_rate_that_corrupts_any_weights(rate):
    for steps, words in (
        (3, f", after 3 steps of SGD with a learning rate of {number_text(rate)}"),
        (0, "; SGD has a lea"),
    ):
        facts = OptimizerFacts(name="SGD", lr=rate, steps=steps)
        found = finding(FAILED.but(source=BAD_WEIGHT, optimizer=facts))
        assert f"before the step{words}" in found.message
        assert found.fix.startswith(f"A learning rate of {number_text(rate)} corrupts any weights")
    sound = finding(FAILED.but(source=BAD_WEIGHT, optimizer=OptimizerFacts(name="SGD", lr=0.1, steps=3)))
    assert "learning rate of" not in sound.message
    assert sound.fix.startswith("Go back to the last checkpoint")


def test_a_number_that_is_nan_has_no_samples():
    found = finding(FAILED.but(source=type(BAD_WEIGHT)(what="number", first_use=ADDMM)))
    assert found.rule.name == "bad-batch"
    assert found.fix.startswith("Check where the number is computed")
    assert "samples" not in found.fix


def test_the_same_tensor_is_reported_once():
    square = origin("aten.mul.Tensor", inputs=(values("self"), values("other")))
    assert finding(FAILED.but(origin=square)).evidence["inputs"] == "input (FP16 8×16, -3.25 to 250) twice"


@for_each(
    ("op", "facts", "roles"),
    [
        ("aten.addmm.default", {}, ("bias", "input", "weight")),
        ("aten.mm.default", {}, ("input", "weight")),
        ("aten.mm.default", {"module_class": "Attention"}, ("left", "right")),
        ("aten.mm.default", {"phase": "backward", "live": False}, ("left", "right")),
        ("aten.div.Tensor", {}, ("dividend", "divisor")),
        ("aten.native_layer_norm.default", {}, ("input", "weight", "bias")),
    ],
)
def test_what_arguments_are_called(op, facts, roles):
    schema = {
        "aten.addmm.default": ("self", "mat1", "mat2"),
        "aten.mm.default": ("self", "mat2"),
        "aten.div.Tensor": ("self", "other"),
        "aten.native_layer_norm.default": ("input", "weight", "bias"),
    }
    inputs = tuple(values(name, shape=(size,)) for size, name in enumerate(schema[op], 1))
    told = operand_texts(origin(op, inputs=inputs, **facts))
    assert tuple(each.partition(" ")[0] for each in told) == roles


# The evidence


def test_evidence_of_an_operation():
    found = finding(EXAMPLES["half-overflow"])
    assert list(found.shown_evidence) == ["inputs", "path", "op"], "the rest is told in the message, or for machines"
    evidence = found.evidence["trace"]
    assert evidence["op"] == "aten.addmm.default"
    assert (evidence["dtype"], evidence["module"], evidence["phase"]) == ("fp16", "blocks.3.fc", "forward")
    assert evidence["inputs"] == [each.as_dict() for each in ADDMM.inputs]
    assert evidence["output"]["census"]["infs"] == 3
    assert (evidence["exact"], evidence["exact_largest"]) == ("finite", 81920.0)
    assert evidence["nan_origin"]["op"] == "aten._softmax.default"
    assert evidence["nan_origin"]["place"] == "/home/me/train.py:31"
    assert (evidence["loss"], evidence["scale"]) == ("NaN", 65536.0)
    assert len(evidence["bad_gradients"]) == 10
    assert (evidence["bad_gradient_count"], evidence["gradients"]) == (12, 12)
    before_and_after = [(trial["loss_before"], trial["loss_after"], trial["finite"]) for trial in evidence["trials"]]
    assert before_and_after == [("NaN", 2.3125, True), ("NaN", "NaN", False)]
    assert "zero_divisors" not in evidence, "what is not known or not so is not told"


@for_each("kind", KINDS)
def test_findings_survive_a_record(kind):
    found = finding(EXAMPLES[kind])
    data = json.loads(dumps(findings_data([CountedFinding(finding=found)])))
    assert data["findings"][0]["evidence"] == dict(found.evidence), "plain already"
    (back,), troubles = read_findings(data)
    assert not troubles
    assert back.finding == found


@for_each("output", output_formats())
def test_every_printer_prints_them(output):
    stream = io.StringIO()
    print_findings([finding(failure) for failure in EXAMPLES.values()], output, stream)
    assert all(rule.name in stream.getvalue() or rule.code in stream.getvalue() for rule in RULES.values())


def test_hostile_names_reach_no_terminal_and_no_page():
    hostile = origin(module="a\x1b[2J\nerror: <b>", module_class="</p><script>", exact="finite", exact_largest=1e5)
    found = finding(FAILED.but(origin=hostile))
    for output in ("full", "concise", "github"):
        stream = io.StringIO()
        print_findings([found], output, stream)
        assert "\x1b[2J" not in stream.getvalue()
        assert "\nerror: <b>" not in stream.getvalue()
    assert "<script>" not in found._repr_html_()


def test_the_commands_explain_them(capsys):
    assert main(["explain", "AMP904"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("AMP904 half-overflow (error)\n")
    assert "Found by\n  ampwise replay, ampwise run, ampwise.trace, ampwise.Engine\n" in out


def test_a_wider_format_that_was_tried_and_failed_is_not_the_advice(tmp_path):
    def fix_of(line, *failed):
        script = tmp_path / "train.py"
        script.write_text(line)
        linecache.checkcache()
        here = CallSite(file=str(script), line=1)
        log = origin("aten.log.default", site=CallSite(file="train.py", line=46), module="")
        trials = [replace(NO_HELP, change="precision", argument=each, origin=log) for each in failed]
        at = origin("aten.exp.default", exact="finite", exact_largest=1e13, site=here, module="")
        return finding(FAILED.but(origin=at, trials=tuple(trials))).fix

    assert "Train in BF16" in fix_of("y = x.exp()")
    assert "Train in BF16" not in fix_of("y = x.exp()", "fp32", "bf16")
    assert "from the logarithm (log) at train.py:46" in fix_of("y = x.exp()", "fp32", "bf16")
    assert fix_of("y = x.half().exp()", "fp32", "bf16").startswith("`.half()` in this line converts to FP16")
    assert "converts" not in fix_of("y = x.exp()  # not x.half()", "fp32", "bf16")
