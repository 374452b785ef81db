"""What holds for every question: an answer, its reasons, and no number without what it rests on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ampwise
from ampwise.cli import build_parser
from ampwise.errors import BadInput, UnknownName
from ampwise.finding.registry import all_rules
from ampwise.finding.strict_json import dumps, loads
from ampwise.hardware import Cpu, CudaDevice, Fp32Switches, Machine, TorchInfo, gpu_named, gpus
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.hardware.target import (
    Target,
    target_for_capability,
    target_for_cpu,
    target_for_gpu,
    target_for_machine,
    unknown_target,
)
from ampwise.tune.advise import advise
from ampwise.tune.advise.choice import (
    MEASURED,
    SPEEDUPS_FEW_TOKENS,
    SPEEDUPS_MANY_TOKENS,
    PrecisionChoice,
    parse_scaling,
)
from ampwise.tune.advise.claims import IDEAS
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.model import KINDS, ModelFacts, parse_count
from ampwise.tune.advise.symptoms import SYMPTOMS

from ...for_each import for_each

ROOT = Path(__file__).parents[3]
BASES = {"read here", "measured by you", "measured on one H200", "derived", "datasheet", "rule"}
PRECISIONS = {"fp32", "tf32", "fp16", "bf16", "fp8", "auto"}
XEON = Cpu(model="a Xeon", features=("amx_bf16", "avx512_bf16"))
TARGETS = (
    *(target_for_gpu(gpu) for gpu in gpus()),
    *(target for text in ("6.1", "7.5", "8.6", "9.0", "12.0") if (target := target_for_capability(text))),
    target_for_cpu(XEON),
    target_for_cpu(Cpu(model=None, features=())),
    target_for_cpu(Cpu(model=None, features=None)),
    Target(name="Apple's GPU", kind="mps", here=True),
    unknown_target("nobody said which"),
)

choices = st.builds(
    PrecisionChoice,
    target=st.sampled_from(TARGETS),
    model=st.builds(
        ModelFacts,
        parameters=st.none() | st.integers(1, 10**12),
        kind=st.none() | st.sampled_from(list(KINDS)),
    ),
    want=st.none() | st.sampled_from(COMMON_FORMATS),
    scaling=st.none() | st.sampled_from(["none", "dynamic", "manual", "manual:8"]).map(parse_scaling),
    ideas=st.lists(st.sampled_from(list(IDEAS)), max_size=3, unique=True).map(tuple),
    symptom=st.none() | st.sampled_from(list(SYMPTOMS)),
    measured=st.none() | st.floats(0.1, 20),
)


@given(choices)
def test_every_question_has_an_answer(choice):
    advice = decide(choice)
    assert advice.precision in PRECISIONS
    assert (advice.precision == "auto") <= (not choice.target.known)
    assert str(advice).splitlines()[0]
    assert {reason.basis for reason in advice.reasons} <= BASES
    assert bool(advice.triage) == (choice.symptom is not None)
    assert (advice.loss_scale is not None) == (advice.precision in ("fp16", "auto"))
    assert "None" not in str(advice).replace("set_to_none", "")


@given(choices)
def test_what_is_wanted_is_given_or_refused(choice):
    """No silent downgrade: another precision than the one wanted comes with a no to it, and the rest of the reasons."""
    advice = decide(choice)
    if choice.want is not None and advice.precision != choice.want:
        assert advice.refused
        exact = any(finding.rule.code == "AMP718" for finding in advice.findings)
        assert exact or choice.want in {finding.evidence.get("refuses") for finding in advice.findings}
    if choice.want is not None and advice.precision == choice.want:
        assert choice.want not in {finding.evidence.get("refuses") for finding in advice.findings}


def recommended(advice):
    """What one is told to do: the fixes, the steps, and what would change the answer on this device."""
    yield from (finding.fix for finding in advice.findings)
    yield from (f"{step.command or ''} {step.tells}" for step in advice.triage)
    yield from (change for change in advice.changes if not change.startswith("A device with"))


def names_for_use(precision):
    """How a text says: take this precision."""
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, precision)
    return re.compile(
        rf'Policy\("{precision}"\)|--precisions \S*\b{precision}\b|dtype=torch\.{dtype}'
        rf"|(?:\buse|\btake|\btrain in|\bstay in|, or) {precision}\b|: {precision}(?=[.,;]| with| where)",
        re.IGNORECASE,
    )


@given(choices)
def test_what_is_refused_is_not_recommended(choice):
    """The answer does not contradict itself: what gets a no is nowhere in what to do instead."""
    advice = decide(choice)
    for precision in (finding.evidence["refuses"] for finding in advice.findings if "refuses" in finding.evidence):
        pattern = names_for_use(precision)
        assert not [text for text in recommended(advice) if pattern.search(text)]


@given(choices)
def test_a_scaler_is_not_taken_out_of_what_needs_one(choice):
    advice = decide(choice)
    if advice.precision == "fp16":
        assert not [finding.fix for finding in advice.findings if finding.fix.startswith("Remove the scaler")]


@given(choices)
def test_every_finding_has_fact_costs_and_a_way_to_know(choice):
    for finding in decide(choice).findings:
        evidence = finding.evidence
        assert finding.message
        assert not finding.message.endswith(".")
        assert finding.fix.rstrip("`")[-1] in ".:" or "\n" in finding.fix
        assert len(evidence["costs"]) >= 2
        assert all(evidence["costs"].values())
        assert evidence["to_know"]["command"].startswith("ampwise ")
        assert evidence["to_know"]["tells"]
        assert evidence["answer"] in ("no", "careful")


@given(choices)
def test_it_is_json(choice):
    advice = decide(choice)
    data = loads(dumps(advice.as_dict()))
    assert data == json.loads(json.dumps(data, allow_nan=False))
    assert data["precision"] == advice.precision
    assert data["refused"] == advice.refused == any(finding.evidence["answer"] == "no" for finding in advice.findings)


@given(choices)
def test_a_speed_up_lies_below_its_ceiling(choice):
    gain = decide(choice).speedup
    if gain is not None:
        assert 0 < gain.low <= gain.high
        assert gain.high <= max(gain.ceiling, 1.0) + 1e-9
    if choice.target.gpu is None:
        assert gain is None


def all_advice():
    asked = [PrecisionChoice(target=target, ideas=(idea,)) for target in TARGETS for idea in IDEAS]
    asked += [PrecisionChoice(target=target, symptom=symptom) for target in TARGETS for symptom in SYMPTOMS]
    asked += [PrecisionChoice(target=target, want=want) for target in TARGETS for want in COMMON_FORMATS]
    asked += [PrecisionChoice(target=TARGETS[0], model=ModelFacts(parameters=7 * 10**9), ideas=("halves-memory",))]
    return [decide(choice) for choice in asked]


def test_every_command_is_one():
    """What one is told to type is parsed, options and all."""
    advised = all_advice()
    commands = {finding.evidence["to_know"]["command"] for advice in advised for finding in advice.findings}
    commands |= {step.command for advice in advised for step in advice.triage if step.command}
    shown = [f"{rule.bad}\n{rule.good}" for rule in all_rules() if "AMP705" <= rule.code < "AMP800"]
    commands |= {line[2:].partition("#")[0] for text in shown for line in text.splitlines() if line.startswith("$ ")}
    for command in (part for each in commands for part in each.split(", then ")):
        first, *words = shlex.split(command)
        assert first == "ampwise"
        _, unknown = build_parser(words).parse_known_args(words)
        assert not unknown or words[0] == "run", command  # whose script takes the rest


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.id)
def test_larger_models_are_not_expected_to_gain_less(gpu):
    target = target_for_gpu(gpu)
    half = target.half
    gains = [
        PrecisionChoice(target=target, model=ModelFacts(parameters=size)).gain(half)
        for size in (10**6, 3 * 10**7, 10**8, 10**10)
        if half
    ]
    known = [gain for gain in gains if gain is not None]
    assert [gain.low for gain in known] == sorted(gain.low for gain in known)
    assert [gain.high for gain in known] == sorted(gain.high for gain in known)


@for_each("precision", ["tf32", "fp16", "bf16"])
def test_what_was_measured_lies_within_what_is_expected(precision):
    model = ModelFacts(parameters=124_500_000, kind="transformer")
    gain = PrecisionChoice(target=target_for_gpu(gpu_named("h200")), model=model).gain(precision)
    assert gain.low <= MEASURED[precision] / MEASURED["fp32"] <= gain.high


@for_each(("speedups", "tokens"), [(SPEEDUPS_FEW_TOKENS, 1024), (SPEEDUPS_MANY_TOKENS, 8192)])
def test_what_is_expected_rests_on_the_published_figures(speedups, tokens):
    result = json.loads((ROOT / "benchmarks/results/sizes_gpu.json").read_text(encoding="utf-8"))
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    published = {row["M parameters"]: row["bf16"] for row in rows if row["tokens a step"] == tokens}
    for millions, speedup in speedups.items():
        expected = published[millions]
        if (millions, tokens) == (124.5, 8192):  # of this size there is one with more tokens
            expected = MEASURED["bf16"] / MEASURED["fp32"]
        assert speedup == pytest.approx(expected, rel=1e-3)
    assert list(speedups.values()) == sorted(speedups.values())


def test_a_slower_gpu_gains_at_smaller_sizes():
    model = ModelFacts(parameters=124_000_000, kind="transformer")
    fast, slow = (
        PrecisionChoice(target=target_for_gpu(gpu_named(name)), model=model).gain("fp16") for name in ("h200", "t4")
    )
    assert fast.low < 1 < slow.low


def test_approximate_peaks_are_marked_and_unknown_ones_give_no_range():
    assert advise(gpu="a10g", params="124M").speedup.text.startswith("~")
    nothing = advise(gpu="8.6", params="124M")
    assert nothing.speedup is None
    assert "are unknown" in nothing.speedup_why


def test_it_is_what_the_engine_chooses_for_a_model_that_is_not_small():
    """The two decide by the same facts, so they may not differ on a device of the catalog."""
    precision = pytest.importorskip("ampwise.train.precision.precision")
    for gpu in gpus():
        if gpu.compute_capability is not None:
            assert advise(gpu=gpu, params="7B").precision == precision.gpu_precisions(_device(gpu)).best
    for features in (("amx_bf16",), ("bf16", "sve"), ("asimdhp",), (), None):
        cpu = Cpu(model="a CPU", features=features)
        assert decide(PrecisionChoice(target=target_for_cpu(cpu))).precision == precision.cpu_precisions(cpu).best


def _device(gpu, index=0):
    return CudaDevice(
        index=index,
        name=gpu.name,
        capability=gpu.capability,
        memory_bytes=gpu.memory_bytes or 2**34,
        bf16_claimed=True,
        bf16_native=gpu.capability >= "8",
        gpu=gpu,
    )


def machine(*devices, torch=True, mps=False, problem=None):
    switches = Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision="highest")
    facts = TorchInfo(version="2.13.0", cuda="12.8", hip=None, devices=devices, mps=mps, fp32=switches, problem=None)
    return Machine(
        python="3.12.1", platform="Linux", cpu=XEON, driver=None, torch=facts if torch else None, torch_problem=problem
    )


def test_this_machine():
    target = target_for_machine(machine(_device(gpu_named("h200")), _device(gpu_named("t4"), 1)))
    assert (target.name, target.half, target.remark) == ("H200 SXM 141GB", "bf16", "the first of 2 kinds of GPU here")
    assert target.memory.value == gpu_named("h200").memory_bytes
    assert target_for_machine(machine()).kind == "cpu"
    assert "torch sees no GPU here" in target_for_machine(machine()).remark
    assert target_for_machine(machine(mps=True)).kind == "mps"
    without = target_for_machine(machine(torch=False))
    assert (without.known, without.half) == (False, None)
    assert without.remark.startswith("torch is not installed, so this machine's devices are unknown")
    assert "OSError: libcuda" in target_for_machine(machine(torch=False, problem="OSError: libcuda")).remark


def test_a_cpu():
    advice = decide(PrecisionChoice(target=target_for_cpu(XEON), model=ModelFacts(parameters=10**8)))
    assert advice.precision == "bf16"
    assert 'device = "cpu"' in advice.by_hand
    assert "is_bf16_supported" not in advice.by_hand
    assert "but LayerNorm, softmax, exp, log and sum in BF16" in advice.kept[0].why
    plain = decide(PrecisionChoice(target=target_for_cpu(Cpu(model="old", features=())), want="bf16"))
    assert (plain.precision, plain.refused) == ("fp32", True)
    assert plain.findings[0].message == "this CPU (old) has no instructions that multiply BF16 matrices"


def test_what_is_not_proposed_is_not_answered():
    for target in TARGETS:
        assert decide(PrecisionChoice(target=target)).findings == ()


def test_an_idea_that_nothing_speaks_against_is_said_to_be_fine():
    advice = advise(gpu="a100-40", want="bf16", ideas="clip-after-backward")
    assert not advice.refused
    assert '"with a GradScaler, clip right after backward()": nothing speaks against it here' in str(advice)


@for_each(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("1.3e9", 1_300_000_000),
        ("124M", 124_000_000),
        ("350k", 350_000),
        ("1_000", 1000),
        ("1t", 10**12),
    ],
)
def test_sizes(text, count):
    assert parse_count(text) == count == advise(gpu="h200", params=text).choice.model.parameters


@for_each("text", ["", "-3", "0", "7 apples", "nan", "inf", "1e99", "0.5", "1e-3", "7BB", "900T"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(BadInput, match=r"expected a number of parameters, such as 124M, 7B or 1\.3e9\."):
        advise(gpu="h200", params=text)


@for_each(
    ("told", "error", "message"),
    [
        ({"gpu": "v101"}, UnknownName, r"unknown device 'v101'\."),
        *(
            ({"gpu": text}, BadInput, rf"compute capability '{text}': expected 3\.x to 12\.x; `ampwise gpu --list`")
            for text in ("99.9", "0.0", "2.1", "8.60", "sm_990", "sm_20")
        ),
        ({"gpu": "580"}, UnknownName, r"unknown device '580'\."),
        ({"gpu": "86"}, UnknownName, r"unknown device '86'\."),
        ({"gpu": "h200", "want": "bf61"}, UnknownName, r"unknown precision 'bf61'\. Did you mean bf16"),
        ({"gpu": "h200", "symptom": "nann"}, UnknownName, r"unknown symptom 'nann'\. Did you mean nan"),
        ({"gpu": "h200", "arch": "gpt"}, UnknownName, r"unknown kind of model 'gpt'\. .*There are transformer, moe"),
        (
            {"gpu": "h200", "ideas": "autocastoff"},
            UnknownName,
            r"unknown idea 'autocastoff'\. Did you mean autocast-off",
        ),
        (
            {"gpu": "h200", "scaling": "static"},
            BadInput,
            r"scaling 'static': expected none, dynamic, manual or manual:1000",
        ),
        ({"gpu": "h200", "scaling": "dynamic:3"}, BadInput, r"scaling 'dynamic:3': expected none, dynamic"),
        ({"gpu": "h200", "scaling": "manual:-1"}, BadInput, r"expected a factor above zero"),
        ({"gpu": "h200", "scaling": "manual:x"}, BadInput, r"expected a factor above zero"),
        ({"gpu": "h200", "measured": float("nan")}, BadInput, r"measured speedup nan: expected a number such as 1\.8"),
        ({"gpu": "h200", "measured": -1.0}, BadInput, r"measured speedup -1"),
        ({"gpu": "h200", "params": True}, BadInput, r"--params True: expected a number of parameters"),
    ],
)
def test_questions_that_make_no_sense(told, error, message):
    with pytest.raises(error, match=message):
        advise(**told)


def test_names_in_any_case_and_devices_of_the_catalog():
    advice = advise(gpu=gpu_named("h200"), want="BF16", arch="Transformer", symptom="NaN", ideas=iter(["just-works"]))
    assert (advice.choice.want, advice.choice.model.kind, advice.choice.symptom) == ("bf16", "transformer", "nan")
    assert repr(advice) == "<Advice: bf16 on H200 SXM 141GB, no: AMP714>"
    assert isinstance(advice.findings[0], ampwise.Finding)
