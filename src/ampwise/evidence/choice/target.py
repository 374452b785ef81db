"""The device that a precision is chosen for: of the catalog, of this machine, or not known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampwise.errors import BadInput
from ampwise.hardware.catalog import COMMON_FORMATS, Figure, Gpu, compute_capability, gpus, nvidia_tensor_cores
from ampwise.hardware.cpu import BF16_FEATURES, Cpu
from ampwise.hardware.device import Device
from ampwise.hardware.machine import Machine

__all__ = ["Target", "of_capability", "of_cpu", "of_gpu", "of_machine", "unknown"]

# What the catalog writes for a capability where torch has a type of device of its own; all others are "cuda" to it.
BACKENDS = ("mps", "xla", "hpu")
FP16_FEATURES = ("amx_fp16",)  # matrix tiles: vector arithmetic in FP16 does not make training fast
OLDEST_COMPILED = (7, 0)  # the compute capability that torch.compile's kernels, written in Triton, begin with
FIRST_WITH_BF16 = (8, 0)
OLDEST_MAJOR = 3  # no torch that this runs with has kernels for older ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device, as far as it is known; of one that is not, every answer is None."""

    name: str
    kind: str | None = None  # torch's type of device: "cuda", "cpu", "mps", "xla", "hpu"
    gpu: Gpu | None = None  # what the catalog knows
    device: Device | None = None  # what torch sees here
    cpu: Cpu | None = None
    capability: tuple[int, int] | None = None  # NVIDIA's
    here: bool = False  # it is in this machine
    remark: str = ""  # on how it was found, or why it was not

    @property
    def known(self) -> bool:
        return self.kind is not None

    @property
    def title(self) -> str:
        """With the compute capability, which decides what an NVIDIA device has."""
        return self.name if self.capability is None else f"{self.name} (compute capability {self.capability_text})"

    @property
    def capability_text(self) -> str:
        return "" if self.capability is None else "{}.{}".format(*self.capability)

    def has(self, fmt: str) -> bool | None:
        """Whether matrix units take a format; None when that is not known."""
        if self.device is not None:
            return self.device.has_matrix_units(fmt)
        if self.gpu is not None:
            return self.gpu.has_matrix_units(fmt)
        if self.cpu is not None:
            return _cpu_has(self.cpu, fmt)
        return None if self.capability is None else nvidia_tensor_cores(fmt, self.capability)

    def peak(self, fmt: str) -> Figure | None:
        """The dense peak in FLOP/s; None unless the catalog has it."""
        return None if self.gpu is None else self.gpu.figure(fmt)

    def ratio(self, narrow: str, wide: str) -> Figure | None:
        """How many times higher the peak of one format is than that of another; None unless both are known."""
        over, under = self.peak(narrow), self.peak(wide)
        if over is None or under is None:
            return None
        return Figure(over.value / under.value, over.approximate or under.approximate)

    @property
    def memory(self) -> Figure | None:
        """In bytes."""
        if self.device is not None:
            return Figure(float(self.device.memory_bytes), approximate=False)
        return None if self.gpu is None else self.gpu.figure("memory_bytes")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats one chooses among that its matrix units take."""
        return tuple(fmt for fmt in COMMON_FORMATS if fmt != "fp32" and self.has(fmt))

    @property
    def half(self) -> str | None:
        """The 16-bit format to train in: BF16 where there are units for it, else FP16; None where there are neither."""
        return next((fmt for fmt in ("bf16", "fp16") if self.has(fmt)), None)

    @property
    def wide(self) -> str:
        """What to compute in without 16 bits: TF32 where it is faster than FP32."""
        return "tf32" if self.tf32_gains else "fp32"

    @property
    def tf32_gains(self) -> bool:
        """Whether TF32 units are there, and not known to be no faster, as on GeForce."""
        ratio = self.ratio("tf32", "fp32")
        return bool(self.has("tf32")) and self.kind == "cuda" and (ratio is None or ratio.value > 1)

    @property
    def emulates_bf16(self) -> bool:
        """NVIDIA before Ampere: torch takes BF16 there, and computes it some other way."""
        return self.capability is not None and self.capability < FIRST_WITH_BF16

    @property
    def compiles(self) -> bool | None:
        """Whether torch.compile has kernels for it; None where nothing is known of that here."""
        if self.kind == "cpu":
            return True
        return None if self.capability is None else self.capability >= OLDEST_COMPILED


def of_gpu(gpu: Gpu) -> Target:
    """A device of the catalog, which may be in no machine near."""
    kind = gpu.capability if gpu.capability in BACKENDS else "cuda"
    return Target(name=gpu.name, kind=kind, gpu=gpu, capability=gpu.compute_capability)


def of_capability(text: str) -> Target | None:
    """An NVIDIA device that is in no catalog, by "8.6" or "sm_86"; None where the text is neither.

    A capability that no device has is refused.

    >>> of_capability("sm_86").half, of_capability("8.6") == of_capability("sm_86"), of_capability("h200")
    ('bf16', True, None)
    """
    capability = compute_capability(re.sub(r"^sm_(\d{1,2})(\d)$", r"\1.\2", text.strip().lower()))
    if capability is None:
        return None
    latest = max(gpu.compute_capability[0] for gpu in gpus() if gpu.compute_capability is not None)
    major, minor = capability
    if not (OLDEST_MAJOR <= major <= latest and minor <= 9):
        raise BadInput(
            f"compute capability {text.strip()[:80]!r}: there are {OLDEST_MAJOR}.x to {latest}.x; "
            "`ampwise gpu --list` shows devices by name."
        )
    return Target(name="an NVIDIA GPU", kind="cuda", capability=capability)


def of_cpu(cpu: Cpu, remark: str = "") -> Target:
    """This machine's CPU."""
    name = "this CPU" if cpu.model is None else f"this CPU ({cpu.model})"
    return Target(name=name, kind="cpu", cpu=cpu, here=True, remark=remark)


def of_machine(machine: Machine) -> Target:
    """What training would use here: the first kind of GPU that torch sees, else the CPU."""
    if machine.torch is None:
        problem = (
            f"torch does not load here ({machine.torch_problem})" if machine.torch_problem else "torch is not here"
        )
        return unknown(f"{problem}, so what this machine has is not known: name a device with --gpu")
    kinds = machine.device_kinds
    if kinds:
        first = kinds[0].first
        more = f"of {len(kinds)} kinds of GPU here, the first" if len(kinds) > 1 else ""
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
        return Target(name="Apple's GPU", kind="mps", here=True, remark="MPS does not say which one it is")
    return of_cpu(machine.cpu, "torch sees no GPU here, so this is about the CPU: name another device with --gpu")


def unknown(remark: str) -> Target:
    """No device, and why."""
    return Target(name="a device that is not known", remark=remark)


def _cpu_has(cpu: Cpu, fmt: str) -> bool | None:
    features = {"bf16": BF16_FEATURES, "fp16": FP16_FEATURES}.get(fmt)
    if features is None:
        return False
    return None if cpu.features is None else any(feature in cpu.features for feature in features)
