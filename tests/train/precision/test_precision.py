"""Which precision a device gets: from records of devices we have not, and from the one that is here."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.hardware import Cpu, CudaDevice, find_gpu
from ampwise.train.precision.precision import (
    EXTRA_PRECISIONS,
    PRECISIONS,
    DevicePrecisions,
    choose_from,
    choose_precision,
    cpu_precisions,
    gpu_precisions,
    other_precisions,
    precision_named,
    precisions_of,
)

from ...for_each import for_each

XEON = Cpu(model="Intel Xeon 8488C", features=("amx_bf16", "avx512_bf16"))


def device(name, capability, *, native=None):
    if native is None:
        native = capability.startswith("gfx") or float(capability) >= 8
    return CudaDevice(
        index=0,
        name=name,
        capability=capability,
        memory_bytes=2**34,
        bf16_claimed=True,
        bf16_native=native,
        gpu=find_gpu(name),
    )


V100 = device("Tesla V100-SXM2-16GB", "7.0")
P100 = device("Tesla P100-PCIE-16GB", "6.0")
T4 = device("Tesla T4", "7.5")
A100 = device("NVIDIA A100-SXM4-80GB", "8.0")
RTX_3090 = device("NVIDIA GeForce RTX 3090", "8.6")
H200 = device("NVIDIA H200", "9.0")
GTX_1660 = device("NVIDIA GeForce GTX 1660", "7.5")  # like a T4 by its capability, and without its tensor cores
MI300X = device("AMD Instinct MI300X", "gfx942")
NEW_AMD = device("AMD Instinct of next year", "gfx9999")
OLD_AMD = device("AMD Radeon of yesterday", "gfx803", native=False)

UNITS = "it has BF16 tensor cores, and BF16's range needs no loss scale"


@for_each(
    ("gpu", "best", "why", "runs"),
    [
        (P100, "fp32", "it has no tensor cores, without which 16 bits gain little", "fp32 fp16"),
        (V100, "fp16", "it has FP16 tensor cores, and none for BF16", "fp32 fp16"),
        (T4, "fp16", "it has FP16 tensor cores, and none for BF16", "fp32 fp16"),
        (GTX_1660, "fp32", "it is not known whether it has tensor cores for 16 bits", "fp32 fp16"),
        (A100, "bf16", UNITS, "fp32 tf32 fp16 bf16"),
        (RTX_3090, "bf16", UNITS, "fp32 tf32 fp16 bf16"),
        (H200, "bf16", UNITS, "fp32 tf32 fp16 bf16"),
        (MI300X, "bf16", UNITS, "fp32 tf32 fp16 bf16"),
        (NEW_AMD, "fp32", "it is not known whether it has tensor cores for 16 bits", "fp32 fp16 bf16"),
        (OLD_AMD, "fp32", "it is not known whether it has tensor cores for 16 bits", "fp32 fp16"),
    ],
)
def test_what_a_gpu_gets(gpu, best, why, runs):
    facts = gpu_precisions(gpu)
    chosen = choose_from("auto", facts)
    assert chosen[:2] == (PRECISIONS[best], f"{best} on {gpu.name}: {why}")
    assert facts.runs == tuple(runs.split())


@for_each(
    ("cpu", "best", "why"),
    [
        (
            XEON,
            "bf16",
            "bf16 on Intel Xeon 8488C: it has BF16 matrix tiles (amx_bf16), and BF16's range needs no loss scale",
        ),
        (
            Cpu(model=None, features=("bf16", "asimdhp", "sve")),
            "bf16",
            "bf16 on this CPU: it has BF16 dot products and matmuls (bf16), and BF16's range needs no loss scale",
        ),
        (
            Cpu(model="EPYC 7763", features=()),
            "fp32",
            "fp32 on EPYC 7763: it has no BF16 instructions: 16 bits would be slower",
        ),
        (Cpu(model="Z80", features=None), "fp32", "fp32 on Z80: its instruction set is not known"),
    ],
)
def test_what_a_cpu_gets(cpu, best, why):
    facts = cpu_precisions(cpu)
    assert choose_from("auto", facts) == (PRECISIONS[best], why, "")
    assert facts.runs == ("fp32", "fp16", "bf16")


def test_of_other_devices_only_what_autocast_takes_is_known():
    facts = other_precisions("mps", (torch.float16,))
    assert facts.runs == ("fp32", "fp16")
    assert choose_from("auto", facts) == (PRECISIONS["fp32"], facts.why, "")
    assert facts.why == "fp32 on mps: it is not known what is fast on mps"


@for_each(
    ("facts", "asked", "text"),
    [
        (
            gpu_precisions(V100),
            "bf16",
            "Engine(precision='bf16'): Tesla V100-SXM2-16GB (compute capability 7.0) has no BF16 tensor cores. "
            "It runs fp32, fp16. Use precision='auto' to let ampwise choose.",
        ),
        (
            gpu_precisions(OLD_AMD),
            "tf32",
            "Engine(precision='tf32'): AMD Radeon of yesterday (gfx803) is not known to have TF32 tensor cores. "
            "It runs fp32, fp16. Use precision='auto' to let ampwise choose.",
        ),
        (
            cpu_precisions(XEON),
            "tf32",
            "Engine(precision='tf32'): Intel Xeon 8488C has no TF32, which is a format of NVIDIA's tensor cores. "
            "It runs fp32, fp16, bf16. Use precision='auto' to let ampwise choose.",
        ),
        (
            other_precisions("mps", (torch.float16,)),
            "bf16",
            "Engine(precision='bf16'): torch's autocast does not support torch.bfloat16 on mps. "
            "It runs fp32, fp16. Use precision='auto' to let ampwise choose.",
        ),
        (
            gpu_precisions(A100),
            "fp8",
            f"Engine(precision='fp8'): {A100.name} (compute capability 8.0) has no FP8 tensor cores. It runs fp32, "
            "tf32, fp16, bf16. FP8 can be emulated: precision='emulate:e4m3'. Use precision='auto' to let "
            "ampwise choose.",
        ),
        (
            cpu_precisions(XEON),
            "fp8",
            "Engine(precision='fp8'): Intel Xeon 8488C has no FP8 tensor cores. It runs fp32, fp16, bf16. FP8 "
            "can be emulated: precision='emulate:e4m3'. Use precision='auto' to let ampwise choose.",
        ),
        (
            gpu_precisions(V100),
            "bf16-pure",
            "Engine(precision='bf16-pure'): Tesla V100-SXM2-16GB (compute capability 7.0) has no BF16 tensor cores. "
            "It runs fp32, fp16. Use precision='auto' to let ampwise choose.",
        ),
    ],
)
def test_what_a_device_cannot_run_is_refused(facts, asked, text):
    with pytest.raises(PrecisionUnavailable) as refused:
        choose_from(asked, facts)
    assert str(refused.value) == text
    assert isinstance(refused.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


NAMES = "The precisions are auto, fp32, tf32, fp16, bf16, fp8, bf16-pure, emulate:mxfp8."


def emulated(fmt):
    return f"That is a format: precision='emulate:{fmt}' computes on values rounded to it, on any device."


def apart(recipe):
    return f"For an FP8 recipe: precision=ampwise.Fp8('{recipe}')."


HP = apart("rowwise+hp-weight-grad")


@for_each(
    ("asked", "text"),
    [
        ("float16", f"unknown precision 'float16'. ampwise calls it 'fp16'. {NAMES}"),
        ("half", f"unknown precision 'half'. ampwise calls it 'fp16'. {NAMES}"),
        ("16-mixed", f"unknown precision '16-mixed'. ampwise calls it 'fp16'. {NAMES}"),
        ("bfloat16", f"unknown precision 'bfloat16'. ampwise calls it 'bf16'. {NAMES}"),
        ("torch.bfloat16", f"unknown precision 'torch.bfloat16'. ampwise calls it 'bf16'. {NAMES}"),
        ("bf16-mixed", f"unknown precision 'bf16-mixed'. ampwise calls it 'bf16'. {NAMES}"),
        ("no", f"unknown precision 'no'. ampwise calls it 'fp32'. {NAMES}"),
        ("32", f"unknown precision '32'. ampwise calls it 'fp32'. {NAMES}"),
        ("float8", f"unknown precision 'float8'. ampwise calls it 'fp8'. {NAMES}"),
        ("bf16-true", f"unknown precision 'bf16-true'. ampwise calls it 'bf16-pure'. {NAMES}"),
        ("emulated:mxfp8", f"unknown precision 'emulated:mxfp8'. {NAMES}"),
        ("BF16", f"unknown precision 'BF16'. Did you mean bf16 or bf16-pure? {NAMES}"),
        ("", f"unknown precision ''. {NAMES}"),
        ("mxfp8", f"unknown precision 'mxfp8'. {emulated('mxfp8')} {NAMES}"),
        ("NVFP4", f"unknown precision 'NVFP4'. {emulated('nvfp4')} {NAMES}"),
        ("e4m3", f"unknown precision 'e4m3'. {emulated('e4m3')} {NAMES}"),
        (
            "e4m3/e5m2,stochastic",
            f"unknown precision 'e4m3/e5m2,stochastic'. {emulated('e4m3/e5m2,stochastic')} {NAMES}",
        ),
        ("fp8,delayed", f"unknown precision 'fp8,delayed'. {apart('delayed')} {NAMES}"),
        ("fp8:delayed", f"unknown precision 'fp8:delayed'. {apart('delayed')} {NAMES}"),
        ("fp8, rowwise+hp-weight-grad", f"unknown precision 'fp8, rowwise+hp-weight-grad'. {HP} {NAMES}"),
        ("fp8-delayd", f"unknown precision 'fp8-delayd'. {apart('delayed')} {NAMES}"),
        ("measured", f"unknown precision 'measured'. {apart('measured')} {NAMES}"),
        ("fp8 ", f"unknown precision 'fp8 '. Did you mean fp8? {NAMES}"),
        ("FP8", f"unknown precision 'FP8'. Did you mean fp8? {NAMES}"),
        ("fp8,", f"unknown precision 'fp8,'. Did you mean fp8? {NAMES}"),
        ("fp64", f"unknown precision 'fp64'. Did you mean fp16? {NAMES}"),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(asked, text):
    with pytest.raises(UnknownName) as refused:
        choose_precision(asked, torch.device("cpu"))
    assert str(refused.value) == text


@for_each(
    ("asked", "text"),
    [
        (
            torch.float16,
            f"Engine(precision=torch.float16): expected a name. ampwise calls it 'fp16'. {NAMES}",
        ),
        (
            torch.float8_e5m2,
            f"Engine(precision=torch.float8_e5m2): expected a name. {emulated('float8_e5m2')} {NAMES}",
        ),
        (16, f"Engine(precision=16): expected a name. ampwise calls it 'fp16'. {NAMES}"),
        (None, f"Engine(precision=None): expected a name. {NAMES}"),
        (True, f"Engine(precision=True): expected a name. {NAMES}"),
    ],
)
def test_something_that_is_no_name_is_refused(asked, text):
    with pytest.raises(BadInput) as refused:
        choose_precision(asked, torch.device("cpu"))
    assert str(refused.value) == text


def test_a_mistake_is_found_before_the_device_is_asked():
    with pytest.raises(UnknownName):
        choose_precision("fp61", torch.device("cuda", 99))


def test_a_device_that_is_not_here():
    seen = torch.cuda.device_count() or "no"
    with pytest.raises(BadInput, match=f"^device 'cuda:99': torch sees {seen} CUDA devices here. Try: ampwise gpu$"):
        choose_precision("auto", torch.device("cuda", 99))


@for_each("name", ["fp32", "fp16", "bf16"])
def test_what_is_asked_for_is_given(name):
    chosen = choose_precision(name, torch.device("cpu"))
    assert chosen[:2] == (PRECISIONS[name], "requested")
    if chosen.precision.dtype is not None:
        with torch.autocast("cpu", dtype=chosen.precision.dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == chosen.precision.dtype


@pytest.mark.parametrize(("kind", "runs"), [("xpu", ("fp32", "fp16", "bf16")), ("meta", ("fp32",))])
def test_autocast_is_asked_what_it_takes(kind, runs):
    assert precisions_of(torch.device(kind)).runs == runs


CAPABILITIES = st.one_of(
    st.tuples(st.integers(3, 15), st.integers(0, 9)).map(lambda pair: f"{pair[0]}.{pair[1]}"),
    st.from_regex(r"\Agfx[0-9a-f]{3,4}\Z"),
)
SOME_GPU = st.builds(
    device, st.sampled_from(["NVIDIA X", "NVIDIA H200", "Tesla T4"]), CAPABILITIES, native=st.booleans()
)
SOME_CPU = st.builds(
    Cpu, model=st.none() | st.just("X"), features=st.none() | st.lists(st.sampled_from(["bf16", "sve"])).map(tuple)
)
SOME_FACTS = SOME_GPU.map(gpu_precisions) | SOME_CPU.map(cpu_precisions)


@given(SOME_FACTS)
def test_auto_is_never_refused_and_every_precision_is_run_or_lacking(facts: DevicePrecisions):
    assert choose_from("auto", facts).precision.name in facts.runs
    assert "fp32" in facts.runs
    assert {*facts.runs, *facts.lacks} & set(PRECISIONS) == set(PRECISIONS)
    assert set(facts.lacks) <= {*PRECISIONS, *EXTRA_PRECISIONS}
    assert not {*facts.runs} & {*facts.lacks}
    assert "\n" not in facts.why


@for_each("name", PRECISIONS)
def test_a_precision_is_filed_under_its_name_and_scaled_if_its_range_is_short(name):
    precision = PRECISIONS[name]
    assert precision.name == name
    short = precision.dtype is not None and torch.finfo(precision.dtype).max < torch.finfo(torch.float32).max / 2
    assert precision.scaled is short
    assert precision.dtype is None or precision.tf32 is None


@for_each(
    ("asked", "name"),
    [
        ("emulate:mxfp8", "emulate:mxfp8_e4m3"),
        ("emulate:e4m3", "emulate:e4m3fn"),
        ("emulate:e4m3/e4m3", "emulate:e4m3fn/e4m3fn"),
        ("emulate: nvfp4 , stochastic", "emulate:nvfp4"),
        ("emulate:nvfp4, plain", "emulate:nvfp4,plain"),
        ("emulate:mxfp6/mxfp8,nearest", "emulate:mxfp6_e3m2/mxfp8_e4m3"),
        ("emulate:fp16", "emulate:fp16"),
    ],
)
@for_each("facts", [gpu_precisions(V100), cpu_precisions(XEON), other_precisions("mps", ())])
def test_what_is_emulated_runs_everywhere_under_the_name_by_which_it_is_found_again(asked, name, facts):
    precision = choose_from(asked, facts).precision
    assert precision.name == name
    assert precision_named(name) == precision
    assert (precision.dtype, precision.tf32, precision.units) == (None, False, None)
    assert precision.scaled is (asked == "emulate:fp16")


@for_each(
    ("asked", "text"),
    [
        (
            "emulate:e4m4",
            "unknown format 'e4m4'. Did you mean e4m3 or e4m3fn? `ampwise formats` lists them all.",
        ),
        ("emulate:e8m0", "e8m0 is an unsigned format for scales, not for matmuls. Choose a signed format."),
        ("emulate:", "emulate:: expected FORMAT[/FORMAT OF GRADIENTS]"),
        ("emulate:e4m3/", "emulate:e4m3/: expected FORMAT[/FORMAT OF GRADIENTS]"),
        ("emulate:e4m3,up", "emulate:e4m3,up: rounding scales up needs an MX format, whose scales are powers of two"),
    ],
)
def test_what_cannot_be_emulated(asked, text):
    with pytest.raises((BadInput, UnknownName)) as refused:
        choose_precision(asked, torch.device("cpu"))
    assert str(refused.value).startswith(text)


@pytest.mark.gpu
def test_auto_on_this_gpu_gives_what_autocast_runs():
    precision, why, _ = choose_precision("auto", torch.device("cuda"))
    assert torch.cuda.get_device_name() in why
    here = torch.ones(16, 16, device="cuda")
    with torch.autocast("cuda", dtype=precision.dtype, enabled=precision.dtype is not None):
        assert (here @ here).dtype == (precision.dtype or torch.float32)
