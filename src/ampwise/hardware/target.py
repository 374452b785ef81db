"""The device that a precision is chosen for: from the catalog, in this machine, or unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampwise.errors import BadInput
from ampwise.hardware.catalog import (
    COMMON_FORMATS,
    Figure,
    Gpu,
    compute_capability,
    gpu_named,
    gpus,
    nvidia_tensor_cores,
)
from ampwise.hardware.cpu import BF16_FEATURES, Cpu, describe_cpu
from ampwise.hardware.device import CudaDevice
from ampwise.hardware.machine import Machine, describe_machine

# Catalog capabilities that name a torch device type; all other devices are "cuda" to torch.
BACKENDS = ("mps", "xla", "hpu")
FP16_FEATURES = ("amx_fp16",)  # matrix tiles: FP16 vector arithmetic does not make training fast
OLDEST_COMPILED = (7, 0)  # the lowest compute capability that Triton, and so torch.compile, supports
FIRST_WITH_BF16 = (8, 0)
OLDEST_MAJOR = 3  # no supported torch has kernels for older ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device, as far as it is known; for an unknown device every answer is None."""

    name: str
    kind: str | None = None  # torch's device type: "cuda", "cpu", "mps", "xla", "hpu"
    gpu: Gpu | None = None  # the catalog entry
    device: CudaDevice | None = None  # as torch sees it on this machine
    cpu: Cpu | None = None
    capability: tuple[int, int] | None = None  # NVIDIA's
    here: bool = False  # it is in this machine
    remark: str = ""  # how it was found, or why it was not

    @property
    def known(self) -> bool:
        return self.kind is not None

    @property
    def device_type(self) -> str:
        """Torch's device type for code to paste: "cuda" if the device is unknown."""
        return self.kind or "cuda"

    @property
    def title(self) -> str:
        """The name with the compute capability, which determines what an NVIDIA device supports."""
        return self.name if self.capability is None else f"{self.name} (compute capability {self.capability_text})"

    @property
    def capability_text(self) -> str:
        return "" if self.capability is None else "{}.{}".format(*self.capability)

    def has(self, fmt: str) -> bool | None:
        """Return whether the device has tensor cores for a format; None if unknown."""
        if self.device is not None:
            return self.device.has_tensor_cores(fmt)
        if self.gpu is not None:
            return self.gpu.has_tensor_cores(fmt)
        if self.cpu is not None:
            features = {"bf16": BF16_FEATURES, "fp16": FP16_FEATURES}.get(fmt, ())
            if features and self.cpu.features is None:
                return None
            return any(feature in (self.cpu.features or ()) for feature in features)
        return None if self.capability is None else nvidia_tensor_cores(fmt, self.capability)

    def peak(self, fmt: str) -> Figure | None:
        """Return the dense peak in FLOP/s; None unless the catalog has it."""
        return None if self.gpu is None else self.gpu.figure(fmt)

    def ratio(self, narrow: str, wide: str) -> Figure | None:
        """Return the ratio of the peaks of two formats; None unless both are known."""
        over, under = self.peak(narrow), self.peak(wide)
        if over is None or under is None:
            return None
        return Figure(over.value / under.value, over.approximate or under.approximate)

    @property
    def memory(self) -> Figure | None:
        """Memory in bytes."""
        if self.device is not None:
            return Figure(float(self.device.memory_bytes), approximate=False)
        return None if self.gpu is None else self.gpu.figure("memory_bytes")

    @property
    def memory_text(self) -> str:
        """Text such as "80 GiB", with ``~`` if it is approximate; empty if unknown."""
        return "" if self.memory is None else f"{'~' if self.memory.approximate else ''}{gib_text(self.memory.value)}"

    @property
    def formats(self) -> tuple[str, ...]:
        """The common formats that the device has tensor cores for."""
        return tuple(fmt for fmt in COMMON_FORMATS if fmt != "fp32" and self.has(fmt))

    @property
    def half(self) -> str | None:
        """The 16-bit format to train in: BF16 if there are tensor cores for it, else FP16; None if neither."""
        return next((fmt for fmt in ("bf16", "fp16") if self.has(fmt)), None)

    @property
    def wide(self) -> str:
        """The precision to use instead of 16-bit: TF32 if it is faster than FP32."""
        return "tf32" if self.tf32_gains else "fp32"

    @property
    def tf32_gains(self) -> bool:
        """Whether there are TF32 tensor cores, unless they are known to be no faster, as on GeForce."""
        ratio = self.ratio("tf32", "fp32")
        return bool(self.has("tf32")) and self.kind == "cuda" and (ratio is None or ratio.value > 1)

    @property
    def emulates_bf16(self) -> bool:
        """Whether torch only emulates BF16 here: NVIDIA before Ampere."""
        return self.capability is not None and self.capability < FIRST_WITH_BF16

    @property
    def compiles(self) -> bool | None:
        """Whether torch.compile supports the device; None if unknown."""
        if self.kind == "cpu":
            return True
        return None if self.capability is None else self.capability >= OLDEST_COMPILED


def target_named(gpu: str | Gpu | None) -> Target:
    """Return the device of this name; None is this machine's, which imports torch."""
    if isinstance(gpu, Gpu):
        return target_for_gpu(gpu)
    if gpu is None:
        return target_for_machine(describe_machine())
    if gpu.strip().lower() == "cpu":
        return target_for_cpu(describe_cpu())
    return target_for_capability(gpu) or target_for_gpu(gpu_named(gpu))


def target_for_gpu(gpu: Gpu) -> Target:
    """Return the target for a catalog device, which need not be in this machine."""
    kind = gpu.capability if gpu.capability in BACKENDS else "cuda"
    return Target(name=gpu.name, kind=kind, gpu=gpu, capability=gpu.compute_capability)


def target_for_capability(text: str) -> Target | None:
    """Return the target for an NVIDIA capability, "8.6" or "sm_86"; None if the text is neither.

    A capability that no device has raises BadInput.

    >>> target_for_capability("sm_86").half, target_for_capability("h200")
    ('bf16', None)
    >>> target_for_capability("8.6") == target_for_capability("sm_86")
    True
    """
    capability = compute_capability(re.sub(r"^sm_(\d{1,2})(\d)$", r"\1.\2", text.strip().lower()))
    if capability is None:
        return None
    latest = max(gpu.compute_capability[0] for gpu in gpus() if gpu.compute_capability is not None)
    major, minor = capability
    if not (OLDEST_MAJOR <= major <= latest and minor <= 9):
        raise BadInput(
            f"compute capability {text.strip()[:80]!r}: expected {OLDEST_MAJOR}.x to {latest}.x; `ampwise gpu --list` "
            "shows devices by name."
        )
    return Target(name="an NVIDIA GPU", kind="cuda", capability=capability)


def target_for_cpu(cpu: Cpu, remark: str = "") -> Target:
    """Return the target for this machine's CPU."""
    name = "this CPU" if cpu.model is None else f"this CPU ({cpu.model})"
    return Target(name=name, kind="cpu", cpu=cpu, here=True, remark=remark)


def target_for_machine(machine: Machine) -> Target:
    """Return what training would use here: the first kind of GPU that torch sees, else the CPU."""
    if machine.torch is None:
        problem = "torch is not installed"
        if machine.torch_problem:
            problem = f"torch does not load here ({machine.torch_problem})"
        return unknown_target(f"{problem}, so this machine's devices are unknown: name a device with --gpu")
    kinds = machine.device_kinds
    if kinds:
        first = kinds[0].first
        more = f"the first of {len(kinds)} kinds of GPU here" if len(kinds) > 1 else ""
        return Target(
            name=first.name,
            kind="cuda",
            gpu=first.gpu,
            device=first,
            capability=first.compute_capability,
            here=True,
            remark=more,
        )
    if machine.torch.mps:
        return Target(name="Apple's GPU", kind="mps", here=True, remark="MPS does not report the model")
    return target_for_cpu(
        machine.cpu, "torch sees no GPU here, so this is about the CPU: name another device with --gpu"
    )


def unknown_target(remark: str) -> Target:
    """Return an unknown target with the reason."""
    return Target(name="an unknown device", remark=remark)


def gib_text(number: float) -> str:
    """
    >>> gib_text(112e9), gib_text(1.6e6)
    ('104 GiB', '0.0015 GiB')
    """
    value = number / 2**30
    return f"{value:.0f} GiB" if value >= 10 else f"{value:.2g} GiB"
