"""`ampwise gpu`, as it is read and as it is parsed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import ampwise.hardware
from ampwise.cli import main
from ampwise.hardware import Cpu, CudaDevice, Fp32Switches, Machine, TorchInfo, find_gpu

pytest.importorskip("rich")


def device(name: str, capability: str, index: int = 0) -> CudaDevice:
    return CudaDevice(
        index=index,
        name=name,
        capability=capability,
        memory_bytes=139 * 2**30,
        bf16_claimed=True,
        bf16_native=capability >= "8",
        gpu=find_gpu(name),
    )


def machine(*devices: CudaDevice) -> Machine:
    return Machine(
        python="3.12.1",
        platform="Linux-6.8",
        cpu=Cpu(model="a Xeon", features=("amx_bf16",)),
        driver="570.86.15",
        torch=TorchInfo(
            version="2.13.0",
            cuda="12.8",
            hip=None,
            devices=devices,
            mps=False,
            fp32=Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision="highest"),
            problem=None,
        ),
    )


@pytest.fixture(autouse=True)
def plain_page(monkeypatch):
    """The same page whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def on(monkeypatch):
    """Make this machine be another one."""

    def be(here: Machine) -> None:
        monkeypatch.setattr(ampwise.hardware, "describe_machine", lambda: here)

    return be


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_machine_with_gpus(on, capsys):
    on(machine(*(device("NVIDIA H200", "9.0", index) for index in range(2))))
    assert main(["gpu"]) == 0
    assert lines(capsys) == [
        "python  3.12.1 on Linux-6.8",
        "CPU     a Xeon; amx_bf16 (BF16 matrix tiles)",
        "torch   2.13.0 (CUDA 12.8, NVIDIA driver 570.86.15)",
        "FP32    matmuls in full FP32, convolutions in TF32 (torch's defaults; a script may change them)",
        "",
        "cuda:0,1  2 × NVIDIA H200",
        "compute capability 9.0, 139.0 GiB, in the catalog as h200",
        "torch.cuda.is_bf16_supported(): True, without emulation: True",
        "",
        "format  tensor cores  dense peak, TFLOP/s  ridge, FLOP/byte",
        "fp32    no                           66.9                14",
        "tf32    yes                         494.7               103",
        "fp16    yes                         989.4               206",
        "bf16    yes                         989.4               206",
        "fp8     yes                        1978.9               412",
        "mxfp8   no                              -                 -",
        "mxfp4   no                              -                 -",
        "nvfp4   no                              -                 -",
        "",
        "AMP703 tf32-disabled-on-device: FP32 matmuls on 2 × NVIDIA H200 do not use its TF32 tensor cores: dense peak "
        "67 instead of 495 TFLOP/s",
        '  fix: Call `torch.set_float32_matmul_precision("high")` before training, if 10 mantissa bits are enough.',
    ]


def test_a_gpu_outside_the_catalog_has_formats_and_no_peaks(on, capsys):
    on(machine(device("NVIDIA GeForce RTX 4060", "8.9")))
    assert main(["gpu"]) == 0
    shown = lines(capsys)
    assert "compute capability 8.9, 139.0 GiB, not in the catalog, so its peaks are unknown" in shown
    assert "format  tensor cores" in shown
    assert "fp8     yes" in shown
    assert "nvfp4   no" in shown


def test_worse_findings_come_first(on, capsys):
    on(machine(device("NVIDIA H200", "9.0"), device("Tesla T4", "7.5", 1)))
    assert main(["gpu"]) == 0
    assert [line[:6] for line in lines(capsys) if line.startswith("AMP")] == ["AMP701", "AMP703"]


@pytest.mark.parametrize(("fmt", "code"), [("bf16", 0), ("FP8", 0), ("nvfp4", 1)])
def test_want_is_a_gate(on, capsys, fmt, code):
    on(machine(device("NVIDIA H200", "9.0")))
    assert main(["gpu", "--want", fmt]) == code
    assert ("has no nvfp4 tensor cores" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("here", "code"),
    [
        (replace(machine(), torch=None), 1),
        (machine(), 1),
        (machine(device("AMD Radeon Graphics", "gfx1100")), 0),  # nobody knows
        (machine(device("NVIDIA H200", "9.0"), device("Tesla T4", "7.5", 1)), 1),
    ],
    ids=["no torch", "no GPU", "not known", "one of two lacks it"],
)
def test_want_needs_a_gpu_and_takes_not_known_for_a_yes(on, here, code):
    on(here)
    assert main(["gpu", "--want", "bf16"]) == code


def test_the_help_says_when_it_exits_with_1(capsys):
    with pytest.raises(SystemExit):
        main(["gpu", "--help"])
    described = " ".join(capsys.readouterr().out.split())
    assert (
        "The exit code is 1 if --want names a format that a GPU here lacks, or if --want is given and torch "
        "sees no usable GPU; else 0, also if support is unknown."
    ) in described


def test_bf16_claimed_and_emulated_is_said(on, capsys):
    on(machine(device("Tesla V100-SXM2-16GB", "7.0")))
    assert main(["gpu"]) == 0
    assert "torch.cuda.is_bf16_supported(): True, without emulation: False" in lines(capsys)


def test_machine_as_json(on, capsys):
    on(machine(device("NVIDIA H200", "9.0")))
    assert main(["gpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["torch"]["devices"][0]["catalog_id"] == "h200"
    assert told["machine"]["torch"]["devices"][0]["tensor_cores"]["nvfp4"] is False
    assert told["machine"]["torch"]["fp32"]["matmul_tf32"] is False
    assert [finding["code"] for finding in told["findings"]] == ["AMP703"]


def test_a_torch_that_does_not_load(on, capsys):
    """What it says is shown as it is: neither as markup nor as an escape sequence."""
    on(replace(machine(), torch=None, torch_problem="OSError: [red]libcudart.so\x1b[2J"))
    assert main(["gpu"]) == 0
    shown = capsys.readouterr().out
    assert r"torch   does not load: OSError: [red]libcudart.so\x1b[2J, so GPUs" in shown


def test_without_a_gpu_it_says_so_and_succeeds(on, capsys):
    on(replace(machine(), driver=None))
    assert main(["gpu"]) == 0
    shown = capsys.readouterr().out
    assert "torch   2.13.0 (CUDA 12.8); torch finds no usable GPU and computes on the CPU" in shown
    assert "AMP" not in shown
    assert "FP32" not in shown, "the TF32 switches are about a GPU"


def test_a_mac(on, capsys):
    mac = replace(machine(), driver=None)
    on(replace(mac, cpu=Cpu(model=None, features=None), torch=replace(mac.torch, cuda=None, mps=True)))
    assert main(["gpu"]) == 0
    shown = capsys.readouterr().out
    assert "Apple GPU through MPS" in shown
    assert "CPU     unknown model; its BF16 and FP16 instructions are unknown" in shown


def test_a_device_of_the_catalog(capsys):
    assert main(["gpu", "a10g"]) == 0
    shown = lines(capsys)
    assert shown[:5] == [
        "A10G (AWS)  (a10g)",
        "",
        "architecture  Ampere, compute capability 8.6",
        "memory        24 GiB",
        "bandwidth     600 GB/s",
    ]
    assert "bf16    yes                         ~70.0              ~117" in shown
    assert "fp8     no                              -                 -" in shown
    assert any(line.startswith("source  https://") for line in shown)


def test_a_device_by_its_torch_name_as_json(capsys):
    assert main(["gpu", "NVIDIA A100-SXM4-80GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["id"] == "a100-sxm-80"
    assert told["peak_flops"]["bf16"] == 312e12
    assert told["ridge_flop_per_byte"]["bf16"] == 312e12 / told["memory_bytes_per_s"]


def test_sources_are_not_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["gpu", "a40"]) == 0
    assert any(line.endswith("vga-outputs.html") and "https://" in line for line in lines(capsys))


def test_list_shows_every_id_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["gpu", "--list"]) == 0
    first_words = {line.split()[0] for line in lines(capsys) if line[:1].strip()}
    assert {gpu.id for gpu in ampwise.hardware.gpus()} <= first_words


def test_list_as_json(capsys):
    assert main(["gpu", "--list", "--json"]) == 0
    assert [gpu["id"] for gpu in json.loads(capsys.readouterr().out)] == [gpu.id for gpu in ampwise.hardware.gpus()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nosuch"],
            "unknown device 'nosuch'. `ampwise gpu --list` shows them all; `ampwise advise --gpu` also takes a compute "
            "capability, such as 8.9 or sm_89.",
        ),
        (
            ["RTX 3090 Ti"],
            "unknown device 'RTX 3090 Ti'. Did you mean rtx3090",
        ),
        (
            ["--want", "fp9"],
            "unknown format 'fp9'. Did you mean fp8 or fp16? --want takes tf32, fp16, bf16, fp8, mxfp8, mxfp4, nvfp4.",
        ),
        (["h200", "--list"], "gpu h200 --list: give a NAME or --list, not both"),
        (
            ["h200", "--want", "fp8"],
            "gpu --want: it is about this machine and cannot be combined with a NAME or --list",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert main(["gpu", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"ampwise: error: {message}")
    assert told.err.count("\n") == 1


def test_findings_alone_in_a_format_other_tools_read(capsys):
    assert main(["gpu", "--output-format", "json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)
    assert main(["gpu", "h200", "--output-format", "json"]) == 2
    assert "gpu --output-format: it is about this machine" in capsys.readouterr().err


def test_of_a_family_the_most_common_variant_is_shown_and_named(capsys):
    assert main(["gpu", "h100", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["id"] == "h100-sxm"
    assert said.err == "ampwise: h100 is taken as H100 SXM5 80GB; others: h100-pcie, h100-nvl\n"
