"""Show which formats this machine, or any GPU, runs fast.

Without a NAME it describes this machine: torch, its devices, its TF32 switches, and what is wrong with them.
With a NAME it shows the catalog entry of a device, by id, by name, or by torch's name for it; of a family, such as
a100, the most common variant.
Peaks are for dense matmuls. A number marked ~ is approximate: sources disagree, or none states it exactly.

Examples:
  ampwise gpu
  ampwise gpu --want fp8 && torchrun train.py
  ampwise gpu h200
  ampwise gpu "NVIDIA A100-SXM4-80GB" --json | jq .peak_flops.bf16

The exit code is 1 if --want names a format that a GPU here lacks, or if --want is given and torch sees no usable
GPU; else 0, also if support is unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ampwise.cli import print_json
from ampwise.cli._arguments import check_gpu
from ampwise.errors import BadInput, UnknownName
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.report.printers import output_formats, print_findings
from ampwise.report.result_view import Headline, Line, Part, ResultTable, print_parts

if TYPE_CHECKING:
    from ampwise.hardware import Gpu, Machine

GROUP = "Look up"
TO_WANT = tuple(fmt for fmt in COMMON_FORMATS if fmt != "fp32")
ANSWERS = {True: "yes", False: "no", None: "unknown"}
TFLOPS, GIB, GB = 1e12, 2**30, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="a device of the catalog (default: this machine)")
    add("--list", action="store_true", help="list the devices of the catalog")
    add(
        "--want",
        metavar="FORMAT",
        action="append",
        default=[],
        help=f"exit with 1 if a GPU here has no tensor cores for it, or there is no GPU: {', '.join(TO_WANT)}; "
        "may be repeated",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="JSON, as `ampwise schema gpu` describes it")
    group.add_argument(
        "--output-format",
        metavar="FORMAT",
        choices=output_formats(),
        help=f"only the findings about this machine, in this format: {', '.join(output_formats())}",
    )


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.registry import run_checks
    from ampwise.hardware import MachineRequirements, describe_machine, gpu_named, gpus

    if args.list and args.name is not None:
        raise BadInput(f"gpu {args.name} --list: give a NAME or --list, not both")
    for option in ("want", "output_format"):
        if getattr(args, option) and (args.list or args.name is not None):
            flag = "--" + option.replace("_", "-")
            raise BadInput(f"gpu {flag}: it is about this machine and cannot be combined with a NAME or --list")
    for fmt in args.want:
        if fmt.lower() not in TO_WANT:
            raise UnknownName("format", fmt, TO_WANT, listing=f"--want takes {', '.join(TO_WANT)}.")
    if args.list:
        if args.json:
            print_json([gpu.as_dict() for gpu in gpus()])
        else:
            print_parts([_catalog(gpus())])
        return 0
    if args.name is not None:
        gpu = gpu_named(args.name)
        check_gpu(args.name)
        if args.json:
            print_json(gpu.as_dict())
        else:
            print_parts(_device(gpu))
        return 0
    wanted = tuple(dict.fromkeys(fmt.lower() for fmt in args.want))
    use = MachineRequirements(machine=describe_machine(), wanted=wanted)
    findings = sorted(run_checks(use), key=lambda finding: (finding.severity.rank, finding.rule.code))
    if args.output_format:
        print_findings(findings, args.output_format)
    elif args.json:
        shown = [finding.as_dict() for finding in findings]
        print_json({"machine": use.machine.as_dict(), "findings": shown})
    else:
        print_parts([*_machine(use.machine), *findings])
    # This rule is about --want; the others are advice.
    return 1 if any(finding.rule.name == "format-without-tensor-cores" for finding in findings) else 0


def _machine(machine: Machine) -> Iterator[Part]:
    from ampwise.hardware.cpu import FEATURES

    model, instructions = machine.cpu.model or "unknown model", "its BF16 and FP16 instructions are unknown"
    if machine.cpu.features is not None:
        instructions = ", ".join(f"{feature} ({FEATURES[feature]})" for feature in machine.cpu.features)
        instructions = instructions or "no instructions for BF16 or FP16"
    facts = {
        "python": f"{machine.python} on {machine.platform}",
        "CPU": f"{model}; {instructions}",
        "torch": _torch(machine),
    }
    if machine.torch is not None and machine.devices:
        uses, fp32 = {True: "TF32", False: "full FP32"}, machine.torch.fp32
        facts["FP32"] = (
            f"matmuls in {uses[fp32.matmul_tf32]}, convolutions in {uses[fp32.convolution_tf32]} (torch's defaults; a "
            "script may change them)"
        )
    yield _facts(facts)
    for kind in machine.device_kinds:
        device = kind.first
        label = "compute capability " if device.compute_capability else ""
        yield Headline(f"{kind.torch_names}  {kind.title}")
        known = f"in the catalog as {device.gpu.id}" if device.gpu else "not in the catalog, so its peaks are unknown"
        yield Line(f"{label}{device.capability}, {device.memory_bytes / GIB:.1f} GiB, {known}")
        emulated = f"{device.bf16_claimed}, without emulation: {device.bf16_native}"
        yield Line(f"torch.cuda.is_bf16_supported(): {emulated}")
        answers = device.tensor_cores
        if device.gpu is None:
            answers.pop("fp32")  # the capability says nothing about it
        yield _formats(answers, device.gpu)


def _torch(machine: Machine) -> str:
    torch = machine.torch
    if torch is None:
        why = f"does not load: {machine.torch_problem}" if machine.torch_problem else "not installed"
        return f"{why}, so GPUs of this machine are unknown"
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "no CUDA in this build"
    driver = f", NVIDIA driver {machine.driver}" if machine.driver else ""
    devices = "" if torch.devices else "; torch finds no usable GPU and computes on the CPU"
    if torch.mps and not torch.devices:
        devices = "; Apple GPU through MPS, which does not report its model"
    return f"{torch.version} ({built}{driver}){devices}"


def _device(gpu: Gpu) -> Iterator[Part]:
    yield Headline(f"{gpu.name}  ({gpu.id})")
    label = "compute capability " if gpu.compute_capability else ""
    memory, bandwidth = gpu.figure("memory_bytes"), gpu.figure("memory_bytes_per_s")
    facts = {
        "architecture": f"{gpu.arch}, {label}{gpu.capability}",
        "memory": f"{memory.show(GIB, 0)} GiB" if memory else "unknown",
        "bandwidth": f"{bandwidth.show(GB, 0)} GB/s" if bandwidth else "unknown",
    }
    if gpu.note:
        facts["note"] = gpu.note
    yield _facts(facts)
    formats = dict.fromkeys((*COMMON_FORMATS, *(gpu.tensor_core_formats or ())))
    yield _formats({fmt: gpu.has_tensor_cores(fmt) for fmt in formats}, gpu)
    yield from (Line(f"source  {url}", "dim") for url in gpu.sources)


def _formats(answers: dict[str, bool | None], gpu: Gpu | None) -> ResultTable:
    """Return a row per format: whether tensor cores take it and, for a catalog device, how fast."""
    rows = []
    for fmt, answer in answers.items():
        rows.append([fmt, ANSWERS[answer]])
        if gpu is not None:
            peak, ridge = gpu.figure(fmt), gpu.ridge_figure(fmt)
            rows[-1] += [peak.show(TFLOPS) if peak else "-", ridge.show(digits=0) if ridge else "-"]
    speeds = ("dense peak, TFLOP/s", "ridge, FLOP/byte") if gpu else ()
    styles = ["dim" if answer is False else "" for answer in answers.values()]
    return ResultTable(
        headings=("format", "tensor cores", *speeds), rows=rows, left=(0, 1), wraps=(2, 3), styles=styles
    )


def _catalog(gpus: Iterable[Gpu]) -> ResultTable:
    rows = []
    for gpu in gpus:
        formats = gpu.tensor_core_formats
        shown = "unknown" if formats is None else " ".join(fmt for fmt in COMMON_FORMATS if fmt in formats)
        rows.append((gpu.id, gpu.capability, shown or "none", gpu.name))
    headings = ("id", "capability", "tensor cores", "name")
    return ResultTable(headings=headings, rows=rows, left=range(4), wraps=(2, 3))  # ids stay whole, to be copied


def _facts(facts: dict[str, str]) -> ResultTable:
    return ResultTable(headings=("", ""), rows=list(facts.items()), left=(0, 1), wraps=(1,))
