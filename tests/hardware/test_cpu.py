"""CPUs, from the text their systems give."""

from __future__ import annotations

import subprocess

import pytest

from ampwise.hardware import Cpu, cpu
from ampwise.hardware.cpu import FEATURES, describe_cpu, parse_cpuinfo, parse_sysctl

SAPPHIRE_RAPIDS = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu vme avx2 avx512f avx512vl avx_vnni avx512_bf16 wbnoinvd amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: amx_fp16
"""

SKYLAKE = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8160 CPU @ 2.10GHz
flags\t\t: fpu vme avx2 f16c avx512f avx512bw avx512vl
"""

NEOVERSE_V1 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes fphp asimdhp cpuid asimddp sve i8mm bf16 svei8mm svebf16 dgh
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""

APPLE = """\
machdep.cpu.brand_string: Apple M2 Max
hw.optional.floatingpoint: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 0
"""


def test_x86_with_everything():
    assert parse_cpuinfo(SAPPHIRE_RAPIDS) == Cpu(
        model="Intel(R) Xeon(R) Platinum 8480+", features=("amx_bf16", "avx512_bf16", "avx512_fp16")
    )


def test_avx512_and_f16c_alone_are_nothing_for_mixed_precision():
    assert parse_cpuinfo(SKYLAKE).features == ()


def test_arm_has_no_model_name_and_calls_its_flags_features():
    assert parse_cpuinfo(NEOVERSE_V1) == Cpu(
        model="ARM implementer 0x41, part 0xd40", features=("bf16", "svebf16", "asimdhp", "fphp", "sve")
    )


def test_a_file_that_says_nothing_leaves_it_unknown():
    assert parse_cpuinfo("") == Cpu(model=None, features=None)
    assert parse_cpuinfo("processor : 0\nhart : 1\n") == Cpu(model=None, features=None)


def test_a_mac():
    assert parse_sysctl(APPLE) == Cpu(model="Apple M2 Max", features=("bf16", "asimdhp"))


def test_an_intel_mac_does_not_tell():
    assert parse_sysctl("machdep.cpu.brand_string: Intel(R) Core(TM) i9") == Cpu(
        model="Intel(R) Core(TM) i9", features=None
    )


@pytest.mark.parametrize("error", [FileNotFoundError("sysctl"), subprocess.TimeoutExpired("sysctl", 5)], ids=type)
def test_a_mac_whose_sysctl_fails_is_unknown(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(cpu.sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", fail)
    assert describe_cpu() == Cpu(model=None, features=None)


def test_this_cpu():
    here = describe_cpu()
    assert here.features is None or set(here.features) <= set(FEATURES)
    assert here.as_dict().keys() == {"model", "features"}
