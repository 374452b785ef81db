from __future__ import annotations

from dataclasses import replace

import pytest

from ampwise.hardware import MachineRequirements
from ampwise.rules.amp7xx_choice.format_without_tensor_cores import RULE, check_hardware


def test_fp8_on_an_a100_is_found(make_machine, make_device):
    machine = make_machine(make_device("NVIDIA A100-SXM4-80GB", "8.0"))
    (finding,) = check_hardware(MachineRequirements(machine=machine, wanted=("bf16", "fp8")))
    assert finding.rule is RULE
    assert finding.message == "NVIDIA A100-SXM4-80GB (8.0) has no fp8 tensor cores"
    assert finding.fix == "Use one it supports: bf16, fp16, tf32."
    assert finding.evidence["format"] == "fp8"


def test_a_gpu_outside_the_catalog_is_judged_by_its_capability(make_machine, make_device):
    machine = make_machine(make_device("NVIDIA GeForce RTX 3060", "8.6"))
    (finding,) = check_hardware(MachineRequirements(machine=machine, wanted=("fp8",)))
    assert finding.message == "NVIDIA GeForce RTX 3060 (8.6) has no fp8 tensor cores"


def test_a_gpu_with_nothing_to_offer_gets_the_general_advice(make_machine, make_device):
    machine = make_machine(make_device("Tesla P100-SXM2-16GB", "6.0"))
    (finding,) = check_hardware(MachineRequirements(machine=machine, wanted=("fp16",)))
    assert finding.fix == RULE.fix


def test_no_gpu_cannot_have_it_either(make_machine):
    for machine in (make_machine(), replace(make_machine(), torch=None)):
        (finding,) = check_hardware(MachineRequirements(machine=machine, wanted=("fp8",)))
        assert finding.message == "fp8 requested, but torch has no GPU here"


@pytest.mark.parametrize(
    ("name", "capability", "wanted"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", ()),
        ("NVIDIA A100-SXM4-80GB", "8.0", ("bf16", "tf32")),
        ("NVIDIA H200", "9.0", ("fp8",)),
        ("AMD Radeon Graphics", "gfx1100", ("bf16",)),  # not known is not known to lack it
    ],
)
def test_silence(make_machine, make_device, name, capability, wanted):
    machine = make_machine(make_device(name, capability))
    assert list(check_hardware(MachineRequirements(machine=machine, wanted=wanted))) == []


def test_an_apple_gpu_is_not_known_to_lack_it(make_machine):
    assert list(check_hardware(MachineRequirements(machine=make_machine(mps=True), wanted=("fp16",)))) == []


def test_a_machine_of_which_nothing_is_wanted_is_silent(make_machine):
    assert list(check_hardware(MachineRequirements(machine=make_machine()))) == []
