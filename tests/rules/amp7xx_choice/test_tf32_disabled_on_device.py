from __future__ import annotations

from dataclasses import replace

import pytest

from ampwise.hardware import Fp32Switches, MachineRequirements
from ampwise.rules.amp7xx_choice.tf32_disabled_on_device import RULE, check_hardware

OFF = Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision="highest")


def test_tf32_off_is_found_with_what_it_costs(make_machine, make_device):
    machine = make_machine(make_device("NVIDIA H200", "9.0"), fp32=OFF)
    (finding,) = check_hardware(MachineRequirements(machine=machine))
    assert finding.rule is RULE
    assert finding.message == (
        "FP32 matmuls on NVIDIA H200 do not use its TF32 tensor cores: dense peak 67 instead of 495 TFLOP/s"
    )
    assert 'torch.set_float32_matmul_precision("high")' in finding.fix


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA RTX A6000", "8.6"), ("NVIDIA B200", "10.0")],
    ids=["not in the catalog", "peaks only approximate"],
)
def test_no_number_is_given_where_none_is_known(make_machine, make_device, name, capability):
    machine = make_machine(make_device(name, capability), fp32=OFF)
    (finding,) = check_hardware(MachineRequirements(machine=machine))
    assert finding.message == f"FP32 matmuls on {name} do not use its TF32 tensor cores"


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla V100-SXM2-16GB", "7.0"),  # has no TF32
        ("NVIDIA GeForce RTX 3090", "8.6"),  # gains nothing by it
        ("AMD Instinct MI300X", "gfx942"),  # the switch alone does not decide
    ],
)
def test_silence_where_the_switch_makes_no_difference(make_machine, make_device, name, capability):
    machine = make_machine(make_device(name, capability), fp32=OFF)
    assert list(check_hardware(MachineRequirements(machine=machine))) == []


def test_silence_when_it_is_on(make_machine, make_device):
    assert list(check_hardware(MachineRequirements(machine=make_machine(make_device("NVIDIA H200", "9.0"))))) == []


def test_silence_without_torch(make_machine):
    assert list(check_hardware(MachineRequirements(machine=replace(make_machine(), torch=None)))) == []
